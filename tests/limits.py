"""Time limits of tests: one that never binds, and one that is over when a test wants it."""

from __future__ import annotations

import time

import pytest

from remat.solver import Progress

AMPLE_S = 600.0
"""Ends no search of the tests, on a busy machine neither: their gaps and their work do that."""


class LateClock:
    """A listener for which all time is up at once, however slow the machine is.

    That is when it hears of `doing`, or, where that is empty, of the first schedule.
    """

    def __init__(self, patch: pytest.MonkeyPatch, doing: str = "") -> None:
        self._doing = doing
        self._ahead_s, self._now_s = 0.0, time.monotonic
        patch.setattr(time, "monotonic", lambda: self._now_s() + self._ahead_s)

    def __call__(self, progress: Progress) -> None:
        """Hear of a search."""
        is_found = progress.best_overhead is not None
        if progress.doing.startswith(self._doing) if self._doing else is_found:
            self._ahead_s = 2 * AMPLE_S
