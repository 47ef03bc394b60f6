"""Time limits of tests: one that never binds, and one that is over when a test wants it."""

from __future__ import annotations

import time

import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.solver import Progress, Result, solve_within

AMPLE_S = 600.0
"""Ends no search of the tests, on a busy machine neither: their gaps and their work do that."""


class LateClock:
    """A listener for which all time is up at once, however slow the machine is.

    That is when it hears of `doing` for the `count`-th time, or, where `doing` is empty, of the
    first schedule.
    """

    def __init__(self, patch: pytest.MonkeyPatch, doing: str = "", count: int = 1) -> None:
        self._doing, self._left = doing, count
        self._ahead_s, self._now_s = 0.0, time.monotonic
        patch.setattr(time, "monotonic", lambda: self._now_s() + self._ahead_s)

    def __call__(self, progress: Progress) -> None:
        """Hear of a search."""
        is_found = progress.best_overhead is not None
        self._left -= self._doing in progress.doing if self._doing else is_found
        if self._left <= 0:
            self.end()

    def end(self) -> None:
        """All time is up."""
        self._ahead_s = 2 * AMPLE_S


def solved_in_rounds(
    graph: TrainingGraph, budget_bytes: int, count: int, **options: object
) -> Result:
    """By `auto`, until it begins its `count`-th search of neighbourhoods."""
    with pytest.MonkeyPatch.context() as patch:
        late = LateClock(patch, "neighbourhoods", count)
        return solve_within(graph, budget_bytes, time_limit_s=AMPLE_S, progress=late, **options)
