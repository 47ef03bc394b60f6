"""When copies out of values begin that ops write to in place.

A sum that is added up in place, and a random state that gets its note from the op that draws, are
whole only after the last write. A copy that a schedule begins before that waits for it. Then the
copy below holds what backward is to read, as a tensor that is saved does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from remat.graph_capture.errors import RewriteError
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step

WritesOf = Callable[[str], tuple[str, ...]]
"""The values that the first run of an op writes to, beside those that it makes."""


@dataclass
class CopyTimes:
    """Which copies out of the device begin later than a schedule has it.

    Attributes
    ----------
    delayed : indices of steps whose copy begins later.
    after_write : by the index of a run, the values copied after it, with the delayed step of each.
    """

    delayed: set[int] = field(default_factory=set[int])
    after_write: dict[int, list[tuple[str, int]]] = field(
        default_factory=dict[int, list[tuple[str, int]]]
    )


def copy_times(schedule: Schedule, writes_of: WritesOf) -> CopyTimes:
    """When each copy out begins.

    Raises
    ------
    RewriteError : a value is written to after it was copied, and the copy is read again.
    """
    times = CopyTimes()
    writes = _writes(schedule, writes_of)
    touches: dict[str, list[tuple[int, Step]]] = {}
    for i, step in enumerate(schedule.steps):
        if not isinstance(step, Compute) and step.value in writes:
            touches.setdefault(step.value, []).append((i, step))
    for value, steps in touches.items():
        for i, step in steps:
            if isinstance(step, Offload) and step.to == "host":
                later = [at for at in writes[value] if i < at < _end_of_stay(steps, i)]
                if later:
                    _require_unread(value, steps, i, later[-1])
                    times.delayed.add(i)
                    times.after_write.setdefault(later[-1], []).append((value, i))
        _require_fresh(value, steps, writes[value])
    return times


def _writes(schedule: Schedule, writes_of: WritesOf) -> dict[str, list[int]]:
    """By value, the indices of the runs that write to it."""
    found: dict[str, list[int]] = {}
    ran: set[str] = set()
    for i, step in enumerate(schedule.steps):
        if isinstance(step, Compute) and step.op not in ran:
            ran.add(step.op)
            for value in writes_of(step.op):
                found.setdefault(value, []).append(i)
    return found


def _end_of_stay(steps: list[tuple[int, Step]], begun: int) -> float:
    """When the value next leaves the device."""
    ends = (i for i, one in steps if i > begun and isinstance(one, Free) and one.at == "device")
    return next(ends, float("inf"))


def _require_unread(value: str, steps: list[tuple[int, Step]], begun: int, until: int) -> None:
    for i, _ in steps:
        if begun < i < until:
            raise _stale(value)


def _require_fresh(value: str, steps: list[tuple[int, Step]], writes: list[int]) -> None:
    """Refuse a fetch of a copy that was made before a write, once the value had left the device."""
    copied_at = -1
    for i, step in steps:
        if isinstance(step, Offload) and step.to == "host":
            stay = [at for at in writes if i < at < _end_of_stay(steps, i)]
            copied_at = max([i, *stay])
        if isinstance(step, Fetch) and any(copied_at < at < i for at in writes):
            raise _stale(value)


def _stale(value: str) -> RewriteError:
    return RewriteError(
        f"the schedule copies {value} to the host before an op has written to it in place, and "
        "reads the copy after that: copy it later, or solve without offloading"
    )
