"""A portfolio by size: keep all, one cut, blocks, then cuts and neighbourhoods in turn.

Solves: least time under a budget on the true peak, any number of recomputations; first runs
in captured order, or in any (`order`). The parts come in order of cost:

1. keep everything; if that fits, it is optimal;
2. on tiny graphs, exhaustive search;
3. one cut, which gives a bound and schedules, and segments between lower sets; windows of
   cuts, where memory is full in several places (`Windows`); where none of these fits, ways
   to any schedule, the quickest first (`initial_solutions`);
4. where the gap stays open, on chains what `rotor` finds; schedules of online policies, or on
   large graphs exchanges;
5. lazy cuts and large neighbourhoods side by side (`Improvement`);
6. on small graphs, the exact program of `checkmate`.

Graphs of thousands of ops get their first schedule from `hierarchical`, before step 3. In a
free order several orders are solved (`free_order`). A graph with links goes to `joint`.
Optimal: where the result says so. Cost: near-linear where one cut closes the gap, which is
the rule on transformers; else the time limit. Shortcomings: those of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, get_args

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.solver import stopping
from remat.solver.backends.processes import Task
from remat.solver.blocks.hierarchical import Hierarchical
from remat.solver.bounds.lazy_cuts import Climbed, Windows
from remat.solver.bounds.least_peak import note_floor, prove_nothing_fits
from remat.solver.cuts.cut import begin, begin_window_cuts, limits_of, offer_climbed
from remat.solver.cuts.initial_solutions import offer_least_peak, offer_policies
from remat.solver.cuts.other_starts import OtherStarts
from remat.solver.exact.checkmate import Checkmate
from remat.solver.exact.exhaustive import Exhaustive, OrderOption
from remat.solver.local_search.events import Runs
from remat.solver.local_search.neighbourhoods import LargeNeighbourhoods
from remat.solver.local_search.repair import offer_exchanges
from remat.solver.orders.free_order import FreeOrder, Share
from remat.solver.problem import can_copy
from remat.solver.result import INTERRUPTED, renamed
from remat.solver.search import Clock, Listener, Search, check_least
from remat.solver.segments.chen_sqrt import chen_state
from remat.solver.segments.rotor import offer_chain
from remat.solver.state import State, ops_of, recomputed_by_stage, store_all_state
from remat.solver.stopping import DEFAULT_GAP, EXACT_OPS, gap_for
from remat.solver.table import REAL, make_solver, options_of

# Both turn counted effort into about seconds; a faster machine does the same work sooner.
_CP_SAT_S = 2.5  # a unit of CP-SAT's deterministic time, with the building of its programs
_ITERATION_S = 1e-3  # an iteration of HiGHS's simplex algorithm, with cuts and the rest
_ROW_S = 6e-4  # of a program of cuts, as expected: within a factor of two on six families
_CUTOFF_SLACK = 1e-6  # more than rounding takes: to prove that nothing is faster closes the gap
_PATIENCE = 1.6  # growth of what a program of cuts may take, after one that did not end in it


class Improvement:
    """Works on `search` until its gap is closed to `gap`, time is up or ideas run out."""

    def __init__(
        self, search: Search, lazy: Windows, gap: float, seed: int = 0, workers: int = 2
    ) -> None:
        self.search, self.lazy, self.gap = search, lazy, gap
        self.seed, self.workers, self.stalled = seed, workers, 0
        self.cuts_limit = stopping.LARGE_CUTS if search.is_large else stopping.CUTS
        self.least_effort, self.n_other_starts = stopping.FIRST_ROUND, 0
        self.programs_s = 0.0  # of the last round, by their iterations
        self.guide: Runs = lazy.start.runs if lazy.start is not None else ()
        self.around: LargeNeighbourhoods | None = None

    def run(self) -> None:
        is_slow = False
        while self.search.is_open(self.gap) and not is_slow:
            open_gap = self.search.gap
            self.least_effort = min(2 * self.least_effort, stopping.ROUND)
            most_stalled = stopping.STALLED_CUTS.most * len(self.lazy.parts)
            has_cuts = not self.lazy.is_done and self.stalled < most_stalled
            is_searched = self.around is not None and self.around.is_exhausted
            # Neighbourhoods need a schedule to search around.
            if not has_cuts and (is_searched or self.search.best is None):
                return
            if has_cuts:
                self._round_of_both()
            else:
                self._search_around(self.workers, self.least_effort / _CP_SAT_S)
            is_last = stopping.LAST_LARGE_ROUND.is_last(self.search.gap, open_gap)
            is_slow = self.search.is_large and is_last

    def _round_of_both(self) -> None:
        before_us, open_gap = self.lazy.bound_us, self.search.gap
        # Of what the round begins with: when neighbourhoods find a better one depends on the clock.
        below_us = self.search.best_key[0] / (1 + self.gap) * (1 + _CUTOFF_SLACK)
        expected_s = max(_ROW_S * self.lazy.n_rows, self.programs_s, self.least_effort)
        effort = expected_s / _CP_SAT_S
        if self.search.best is not None:
            self.lazy.spent_us = self._spent_us(self.search.best)
        if self.search.best is None or self.workers == 1:
            found = self._programs(open_gap, below_us)
            if self.search.best is not None:
                self._search_around(1, effort)
        else:
            # Before the programs change.
            others = OtherStarts(self.search, self.lazy, self.seed, self.n_other_starts)
            # Both are waited for, so the outcome depends on seed and workers, not on who was first.
            with Task(lambda: self._programs(open_gap, below_us)) as solving:
                self._search_beside(others, self.workers - 1, effort)
                found = solving.wait()
            self.n_other_starts = others.tried
        for climbed in found:
            offer_climbed(self.search, climbed)
            # The guide need not fit: the stages in which it recomputes are worth a try.
            if climbed.start is not None and climbed.solution.finished:
                self.guide = climbed.start.runs
        # What a limit ended depends on the clock.
        ended = [climbed.solution for climbed in found if climbed.solution.finished]
        self.programs_s = _ITERATION_S * sum(solution.iterations for solution in ended)
        if not found[-1].solution.finished:
            self.cuts_limit = self.cuts_limit.longer(_PATIENCE)
        is_higher = self.lazy.bound_us > before_us * (1 + 1e-6)
        self.stalled = 0 if is_higher else self.stalled + 1

    def _programs(self, open_gap: float, below_us: float) -> list[Climbed]:
        found: list[Climbed] = []
        spent = 0.0
        while spent < self.least_effort and not self.lazy.is_done:
            # The gap as the round began: when neighbourhoods narrow it depends on the clock.
            limits = limits_of(self.search, self.lazy, self.gap, open_gap)
            limit_s = self.cuts_limit.of(limits.time_limit_s)
            found.append(self.lazy.climb(replace(limits, time_limit_s=limit_s), below_us))
            # Presolve may solve a program without an iteration.
            spent_s = _ITERATION_S * found[-1].solution.iterations
            spent += max(spent_s, stopping.FIRST_ROUND / 10)
            if not found[-1].solution.finished:
                break
        return found

    def _spent_us(self, best: Schedule) -> list[float]:
        problem = self.search.problem
        again = recomputed_by_stage(problem, ops_of(problem, best))
        return [sum(problem.cost_us[op] for op in stage) for stage in again]

    def _search_beside(self, others: OtherStarts, workers: int, effort: float) -> None:
        """Around the best for a part of `effort`, then from other starts and around it in turn."""
        effort -= self._search_around(workers, self.least_effort / _CP_SAT_S)
        while effort > 0 and self.search.is_open(self.gap):
            spent = others.offer_next(workers)
            self.guide = others.runs or self.guide
            effort -= spent + self._search_around(workers, min(effort, spent) or effort)
            if self.around is not None and self.around.is_exhausted:
                return

    def _search_around(self, workers: int, effort: float) -> float:
        """Returns what was spent of `effort`."""
        best_us = self.search.best_key[0] - self.search.graph.time_us
        if self.around is None:
            self.around = LargeNeighbourhoods(
                self.search, lambda: not self.search.is_open(self.gap), self.seed
            )
        elif best_us < self.around.cost_us * (1 - 1e-9):  # cuts may have found a better one
            self.around.restart()
        self.around.workers, self.around.guide = workers, self.guide
        return self.around.run(effort)


_PATIENT_S = 20.0  # a limit above which `hierarchical` tries larger blocks if nothing fits yet
_TINY_OPS = 14  # graphs of at most so many ops are searched exhaustively


@dataclass(frozen=True)
class Auto:
    """The default solver.

    Attributes
    ----------
    gap : stop once time is proved within this fraction of the best.
    seed, workers : of the neighbourhoods; the same two give the same schedule, unless the
        time limit cuts the search short.
    order : first runs in captured order (``fixed``) or in any (``free``), for which then
        the bound holds too.
    known_us : the time of a schedule that is known, if first runs keep their order: the search
        ends where it is proved that none is faster by more than `gap`.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    copies: ClassVar[bool] = True

    gap: float = DEFAULT_GAP
    seed: int = 0
    workers: int = 2
    order: OrderOption = "fixed"
    time_limit_s: float = 60.0
    progress: Listener | None = None
    known_us: float = inf

    def __post_init__(self) -> None:
        check_least(1, workers=self.workers)
        gap: Any = self.gap
        if not isinstance(gap, REAL) or not gap >= 0:
            raise SolverError(f"gap must be 0 or more, not {gap}")
        if self.order not in get_args(OrderOption):
            raise SolverError(f"order must be fixed or free, not '{self.order}'")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        if can_copy(graph):
            made = make_solver(
                "joint", gap=self.gap, seed=self.seed, workers=self.workers,
                time_limit_s=self.time_limit_s, progress=self.progress,
            )  # fmt: skip
            # A plan names what was asked for.
            return renamed(made.solve(graph, budget_bytes), "auto", options_of(self))
        clock = Clock(self.time_limit_s)
        is_tiny = len(graph.ops) <= _TINY_OPS
        if is_tiny and (found := self._solve_tiny(graph, budget_bytes)) is not None:
            return found
        if self.order == "fixed":
            limit_s = ((1 - stopping.TINY.part) if is_tiny else 1.0) * self.time_limit_s
            return self._solve_fixed(graph, budget_bytes, Share(limit_s, self.progress))
        return FreeOrder(
            graph, budget_bytes, self._solve_fixed, gap_for(len(graph.ops), self.gap),
            self.seed, clock=clock, progress=self.progress,
        ).solve()  # fmt: skip

    def _solve_fixed(self, graph: TrainingGraph, budget_bytes: int, share: Share) -> Result:
        search = self._search(graph, budget_bytes, share)
        with search.until_interrupted():
            self._run(search, share)
        note_floor(search)
        return search.result()

    def _search(self, graph: TrainingGraph, budget_bytes: int, share: Share) -> Search:
        limit_s, options = share.time_limit_s, options_of(self)
        search = Search(graph, budget_bytes, "auto", limit_s, share.progress, options)
        if self.order == "fixed":  # in a free order others may be faster
            search.enough_us = self.known_us / (1 + gap_for(len(graph.ops), self.gap))
        return search

    def _run(self, search: Search, share: Share) -> None:
        plain = store_all_state(search.problem)
        if search.offer(plain):  # no op runs twice, so nothing is faster
            return
        if share.start is not None:
            search.offer_schedule(share.start)
        if search.has_room() and not search.out_of_time():
            self._close_gap(search, plain, share)
        if search.best is None and search.lowest is None and not share.is_look:
            offer_least_peak(search, plain)
        if search.best is None and search.is_large and not share.is_look:
            # No longer than reading the graph: a search whose time ended has some answer.
            search.offer_least(chen_state(search.problem))

    def _close_gap(self, search: Search, plain: State, share: Share) -> None:
        if search.is_large:  # before the cut, whose repairs are slow on thousands of ops
            Hierarchical().first(search, is_thorough=search.left_s > _PATIENT_S)
        gap = gap_for(len(search.graph.ops), self.gap)
        has_start = share.start is not None
        if share.is_look:
            begin(search, plain, gap, has_start=has_start)
            prove_nothing_fits(search)
            search.cut_short |= search.is_open(gap)
            return
        windows = begin_window_cuts(search, plain, gap, has_start=has_start)
        prove_nothing_fits(search)
        if not has_start and search.is_open(gap):
            offer_chain(search)  # on a chain of 100, better than a minute of what follows
        # Policies take long, and beside several windows, or starts of several cuts, found nothing.
        is_several = windows is not None and (len(windows.parts) > 1 or windows.start is not None)
        has_enough = is_several and search.best is not None
        if not has_start and search.is_open(gap) and not has_enough:
            # On an unrolled LSTM of 1,091 ops, exchanges halved overhead; policies found nothing.
            can_exchange = search.is_large and search.best_state is not None
            (offer_exchanges if can_exchange else offer_policies)(search)
        if search.best is None and search.lowest is None:
            offer_least_peak(search, plain)
        if windows is not None and not search.proved_infeasible:
            Improvement(search, windows, gap, self.seed, self.workers).run()
        if len(search.graph.ops) <= EXACT_OPS and search.is_open(gap):
            Checkmate().run(search, stopping.EXACT.of(search.left_s))

    def _solve_tiny(self, graph: TrainingGraph, budget_bytes: int) -> Result | None:
        """By exhaustive search; None where its part of the time did not do."""
        limit_s = stopping.TINY.of(self.time_limit_s)
        search = self._search(graph, budget_bytes, Share(limit_s, self.progress))
        with search.until_interrupted():
            Exhaustive(order=self.order).run(search)
        if search.proved_infeasible and self.order == "free":
            search.note("That holds for every order of first computations")
        note_floor(search)
        found = search.result()
        # Ctrl-C ends the whole solve.
        is_settled = found.status != "time limit" or found.message.startswith(INTERRUPTED)
        return found if is_settled else None
