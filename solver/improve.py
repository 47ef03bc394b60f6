"""Bound and schedule brought together: lazy cuts from below, neighbourhoods from above.

A round solves the program of the cuts so far in one thread, while the others search
neighbourhoods of the best schedule. It waits for both before it uses either. So the outcome
depends on the seed and the number of workers, and not on who was first. With one worker the
two take turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from remat.schedules.schedule import Schedule
from remat.solver.backends.background import Task
from remat.solver.backends.mip import Limits
from remat.solver.bounds.lazy_cuts import Climbed
from remat.solver.bounds.windows import Windows
from remat.solver.cuts.cut import limits_of, take_climbed
from remat.solver.local_search.events import Runs
from remat.solver.local_search.large_neighbourhood import LargeNeighbourhoods
from remat.solver.search import Search
from remat.solver.sequence import ops_of, recomputed_by_stage
from remat.solver.stopping import (
    CUTS,
    FIRST_ROUND,
    LARGE_CUTS,
    LAST_LARGE_ROUND,
    ROUND,
    STALLED_CUTS,
    Seconds,
)

CP_SAT_S = 2.5
"""Seconds that a unit of CP-SAT's deterministic time took, with the building of its programs."""
ITERATION_S = 4e-4
"""Seconds that HiGHS took for an iteration of the simplex algorithm, with cuts and the rest.

Both only turn counted effort into about seconds; a faster machine does the same work sooner.
"""
GROWTH = 1.5
"""How much longer the next program of cuts is expected to take."""
PATIENCE = 1.6
"""Growth of what a program of cuts may take, after one that did not end in it."""


@dataclass(slots=True)
class Improvement:
    """Works on `search` until its gap is closed to `gap`, time is up or ideas run out."""

    search: Search
    lazy: Windows
    gap: float
    seed: int = 0
    workers: int = 2
    stalled: int = 0
    cuts_limit: Seconds = field(init=False)
    effort: float = 0.0
    least_effort: float = FIRST_ROUND.most
    guide: Runs = ()
    around: LargeNeighbourhoods | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.cuts_limit = LARGE_CUTS if self.search.is_large else CUTS

    def run(self) -> None:
        """Rounds until there is nothing left to do."""
        is_slow = False
        while self.search.is_open(self.gap) and not is_slow:
            open_gap = self.search.gap
            self.least_effort = min(2 * self.least_effort, ROUND.most)
            most_stalled = STALLED_CUTS.most * len(self.lazy.parts)
            has_cuts = not self.lazy.is_done and self.stalled < most_stalled
            is_searched = self.around is not None and self.around.is_exhausted
            if not has_cuts and (is_searched or self.search.best is None):
                return
            if has_cuts:
                self._round_of_both()
            else:
                self._search_around(self.workers, self.least_effort / CP_SAT_S)
            is_slow = self.search.is_large and LAST_LARGE_ROUND.is_last(self.search.gap, open_gap)

    def _round_of_both(self) -> None:
        """Some programs of cuts, and neighbourhoods beside them."""
        before_us, open_gap = self.lazy.bound_us, self.search.gap
        effort = max(self.effort, self.least_effort) / CP_SAT_S
        if self.search.best is not None:
            self.lazy.spent_us = self._spent_us(self.search.best)
        if self.search.best is None or self.workers == 1:
            found = self._programs(open_gap)
            if self.search.best is not None:
                self._search_around(1, effort)
        else:
            with Task(lambda: self._programs(open_gap)) as solving:
                self._search_around(self.workers - 1, effort)
                found = solving.wait()
        for climbed in found:
            take_climbed(self.search, climbed)
            # The guide of neighbourhoods need not fit, but it recomputes little: the stages in
            # which it does are worth a try.
            if climbed.start is not None and climbed.solution.finished:
                self.guide = [sorted(stage.recomputed) for stage in climbed.start.stages]
        if not found[-1].solution.finished:
            self.cuts_limit = self.cuts_limit.longer(PATIENCE)
        is_higher = self.lazy.bound_us > before_us * (1 + 1e-6)
        self.stalled = 0 if is_higher else self.stalled + 1

    def _programs(self, open_gap: float) -> list[Climbed]:
        """Programs of cuts, each refined by the one before, until a round is filled.

        Schedules that neighbourhoods find meanwhile are left aside: when they come depends on
        the clock.
        """
        found: list[Climbed] = []
        spent = 0.0
        while spent < self.least_effort and not self.lazy.is_done:
            found.append(self.lazy.climb(self._limits(open_gap)))
            self.effort = GROWTH * ITERATION_S * found[-1].solution.iterations
            spent += max(self.effort, FIRST_ROUND.most / 10)
            if not found[-1].solution.finished:
                break
        return found

    def _limits(self, open_gap: float) -> Limits:
        limits = limits_of(self.search, self.lazy, self.gap, open_gap)
        return replace(limits, time_limit_s=self.cuts_limit.of(limits.time_limit_s))

    def _spent_us(self, best: Schedule) -> list[float]:
        problem = self.search.problem
        again = recomputed_by_stage(problem, ops_of(problem, best))
        return [sum(problem.cost_us[op] for op in stage) for stage in again]

    def _search_around(self, workers: int, effort: float) -> None:
        """Neighbourhoods of the best schedule known."""
        best_us = self.search.best_key[0] - self.search.graph.time_us
        if self.around is None:
            self.around = LargeNeighbourhoods(
                self.search, lambda: not self.search.is_open(self.gap), self.seed
            )
        elif best_us < self.around.cost_us * (1 - 1e-9):
            self.around.restart()
        self.around.workers, self.around.guide = workers, self.guide
        self.around.run(effort)
