"""Moves the solver's target until the code of a plan keeps to a limit.

The peak of Inductor's code is known once the code is generated. It differs from the peak of the
schedule by some per cent, either way. So a target whose code takes too much is lowered by the
excess, and one whose code leaves room is raised. The peak of the code alone decides what fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from remat.budgets import UNBOUNDED_BYTES

_NARROW = 1.01
"""Ratio of a target that does not fit to one that does, below which nothing is tried between."""
_STEP = 0.995
"""How far below a target that did not fit the next one is, at least."""


class _Generated(Protocol):
    """A schedule with the code that was made of it."""

    @property
    def schedule_peak_bytes(self) -> int: ...

    @property
    def code_peak_bytes(self) -> int: ...

    @property
    def time_us(self) -> float: ...

    @property
    def is_least(self) -> bool:
        """Whether no schedule fits the target, so that this is the least one known."""
        ...


_G = TypeVar("_G", bound=_Generated)


def fastest_within(
    limit_bytes: int,
    generated: Callable[[int], _G | None],
    *,
    tries: int,
    is_enough: Callable[[_G], bool],
) -> _G | None:
    """The fastest plan found whose code keeps to the limit; None where none does.

    `generated` makes a schedule for a target in bytes, and its code. Each of `tries` costs a solve
    and some seconds for the code.
    """
    best: _G | None = None
    seen: list[_G] = []
    fitting, failing, target = 0, UNBOUNDED_BYTES, limit_bytes
    for _ in range(tries):
        found = generated(target)
        if found is None:
            break
        if found.code_peak_bytes <= limit_bytes:
            if best is None or found.time_us < best.time_us:
                best = found
            fitting = max(fitting, target)
            if is_enough(found):
                break
        else:
            failing = min(failing, target)
        target = _next_target(found, limit_bytes, target, fitting, failing)
        # A lower target gives the least schedule again, so there is nothing more to find.
        is_bottom = found.is_least and any(found is one for one in seen)
        if failing <= _NARROW * fitting or is_bottom:
            break
        seen.append(found)
    return best


def _next_target(
    found: _Generated, limit_bytes: int, target: int, fitting: int, failing: int
) -> int:
    """The target whose code would just meet the limit, between what fits and what does not."""
    room_bytes = limit_bytes - found.code_peak_bytes
    # The code's peak is taken to stay as far from the schedule's as it is. With several calls of a
    # graph it moves faster, as what the others have left moves too, so the target goes no further
    # than in proportion.
    ratio = limit_bytes / max(1, found.code_peak_bytes)
    if room_bytes >= 0:
        reached = max(found.schedule_peak_bytes, int(target / _NARROW))
        guess = min(reached + room_bytes, int(max(reached, target) * ratio))
    else:
        least = min(target, found.schedule_peak_bytes)
        guess = min(max(least + room_bytes, int(least * ratio)), int(_STEP * least))
    if fitting and failing < UNBOUNDED_BYTES and not fitting < guess < failing:
        # The guess lies where the answer is known.
        return (fitting + failing) // 2
    return guess
