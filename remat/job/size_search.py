"""The largest size for which something holds, where a try is costly and a guess is cheap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GUESSES = 4
"""Tries that follow a guess. Later ones double or halve the size, in case guesses are wrong."""


@dataclass(frozen=True)
class Range:
    """Sizes from `least` to `most`, in steps of `step`; all three in the user's own units."""

    least: int
    most: int
    step: int

    def below(self, size: int) -> int:
        """The largest size of the range that is `size` or less."""
        return self.least + (min(size, self.most) - self.least) // self.step * self.step


def largest(
    sizes: Range,
    holds: Callable[[int], bool],
    guess: Callable[[int, int | None], int],
    fits: int | None,
    fails: int | None,
) -> int | None:
    """The largest size for which `holds`, none larger by a step does; None where no size does.

    It is taken for granted that a size holds if a larger one does.

    Parameters
    ----------
    holds : costly; called once a size. guess : takes a size that holds, and one that does not or
        None; returns the largest that is thought to hold.
    fits, fails : a size that is known to hold, and one that is known not to.
    """
    low = sizes.least - sizes.step if fits is None else fits
    tries = 0
    while fails is None or fails - low > sizes.step:
        if low + sizes.step > sizes.most:
            break
        size = _next(sizes, low, fails, guess, tries)
        tries += 1
        if holds(size):
            low = size
        else:
            fails = size
    return low if low >= sizes.least else None


def _next(
    sizes: Range,
    low: int,
    fails: int | None,
    guess: Callable[[int, int | None], int],
    tries: int,
) -> int:
    """The guess, or the next size if that much holds already; later the double or the middle."""
    top = sizes.most if fails is None else fails - sizes.step
    if tries >= GUESSES and fails is None:
        return min(max(sizes.below(2 * low), low + sizes.step), top)
    if tries >= GUESSES and fails is not None:
        return max(sizes.below((low + fails) // 2), low + sizes.step)
    wanted = sizes.below(guess(low, fails))
    return min(max(wanted, low + sizes.step), top)
