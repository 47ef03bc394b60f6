"""Single cut, just-in-time expansion, greedy repair: for graphs of any size.

Also called: Lagrangian or knapsack-closure bound with primal repair.
Source: the cut is the restriction of Checkmate's MILP (Jain et al. 2020,
https://arxiv.org/abs/1910.02653) to one moment; choosing what to keep across it is the
knapsack problem of "selective activation recomputation" with recompute chains counted.
Solves: least time under a budget on the true peak, first runs in captured order, any number
of recomputations. The program of `cut_program` gives a proven bound and a start; the start
is expanded just in time, repaired under the true peak and filled with what still fits.
Where the gap stays open, segments between lower sets and cuts at lower targets give more
starts, and the fullest stage becomes a further cut, bound and start in one.
Optimal: where bound and schedule meet, which is the rule on transformers (gap below 1 %).
Cost: about one MILP of n binaries and one dense row; near-linear up to some 5,000 ops.
Shortcomings: the order of first runs is given; in a stage an op runs at most once again;
weak on layered graphs and on convolutional nets below 30 % of their peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver import stopping
from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import COST_SCALE, CutProgram, expand
from remat.solver.bounds.lazy_cuts import Climbed, LazyCuts, Windows, windows_of
from remat.solver.bounds.least_peak import note_floor, prove_nothing_fits
from remat.solver.cuts.initial_solutions import offer_first, offer_least_peak, offer_segments
from remat.solver.local_search.repair import Repair, offer_exchanges, offer_filled
from remat.solver.problem import largest_working_set_bytes
from remat.solver.search import Listener, Search
from remat.solver.state import State, store_all_state
from remat.solver.stopping import CUT_NODES

TARGETS = (0.97, 0.93, 0.88, 0.8, 0.7, 0.6)  # of the room above the largest working set, for starts
_POWERS = (0.3, 0.6, 1.0, 1.6)
RELAXED_POWERS = _POWERS[2:]  # of starts far from any schedule
# Segments take seconds on thousands of ops. On an LSTM: 31 % of overhead, with cuts 50 %.
_WIDE = 0.05
_HALF_WIDE = 0.02  # where relaxed programs of more cuts say what windows take ten times as long for
_WIDEST = 8  # ops with the largest working sets, whose cuts are tried too
_GAP_PART = 0.1  # of the open gap that a program of cuts may leave, where less is asked for


@dataclass(frozen=True)
class Cut:
    """Solver for graphs of any size.

    Attributes
    ----------
    gap : stop once time is proved within this fraction of the best.
    cuts : most cuts in one program; 1 keeps to a single cut.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    gap: float = stopping.DEFAULT_GAP
    cuts: int = 5
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "cut", graph, budget_bytes)
        with search.until_interrupted():
            self.run(search)
        note_floor(search)
        return search.result()

    def run(self, search: Search) -> None:
        plain = store_all_state(search.problem)
        if search.offer(plain):
            return
        if search.has_room():
            self._close_gap(search, plain)
        if search.best is None and search.lowest is None:  # it names the least budget known
            offer_least_peak(search, plain)

    def _close_gap(self, search: Search, plain: State) -> None:
        lazy = begin(search, plain, self.gap)
        prove_nothing_fits(search)
        while lazy is not None and not lazy.is_done and len(lazy.cuts) <= self.cuts:
            if not search.is_open(self.gap):
                break
            search.say(f"{len(lazy.cuts)} cuts, the last at {search.graph.ops[lazy.cuts[-1]].name}")
            offer_climbed(search, lazy.climb(limits_of(search, lazy, self.gap, search.gap)))
        if search.is_open(self.gap):
            offer_exchanges(search)


def begin(
    search: Search, plain: State, gap: float, *, has_start: bool = False, policies: bool = False,
    if_narrow: bool = False,
) -> LazyCuts | None:  # fmt: skip
    """The best single cut; None where nothing fits, or time ends early on a large graph.

    With `if_narrow` a wide gap is left to starts of more cuts.
    """
    search.say("choosing where to cut")
    place = best_cut(search, plain, lambda t: CutProgram(search.problem, (t,), search.budget_bytes))
    if place is None or (search.is_large and search.out_of_time()):  # all else takes long there
        return None
    lazy = LazyCuts(search.problem, search.budget_bytes, (place,))
    search.say(f"1 cut, at {search.graph.ops[place].name}")
    first = lazy.climb(limits_of(search, lazy, gap, search.gap, stopping.FIRST_CUT_NODES))
    # A first repair that takes long waits: segments may give a better start in less than a second.
    is_repaired = offer_climbed(search, first, stopping.FIRST_REPAIRS.from_now(search.work))
    if search.is_open(gap) and search.gap > _WIDE and (search.best is None or not has_start):
        offer_segments(search)
    if search.best is None:
        offer_first(search, plain, is_patient=not has_start, policies=policies)
    if not is_repaired and search.best is None and not has_start:
        offer_climbed(search, first)
    # With a schedule to improve on, or other starts behind, one more will do.
    if not has_start and not (if_narrow and search.gap > _WIDE):
        _offer_targets(search, place, gap)
    return lazy


def _offer_targets(search: Search, place: int, gap: float) -> None:
    # Starts from lower targets differ, which was worth more than annealing one.
    for target_bytes in targets_of(search):
        if search.is_open(gap) and not _has_worked(search, stopping.FIRST_REPAIRS.most):
            search.say(f"start for {target_bytes} bytes")
            program = CutProgram(search.problem, (place,), target_bytes)
            solution = program.relaxed(stopping.RELAXED.of(search.left_s))
            if solution.values is not None:
                repair_from(search, State.from_recomputed(search.problem, expand(solution)))


def offer_climbed(search: Search, climbed: Climbed, most_work: float = float("inf")) -> bool:
    """Record the bound, repair the expansion; False if `most_work` ended the repairs."""
    if climbed.solution.bound_us == float("inf"):
        search.proved_infeasible = True
        return True
    search.raise_bound(climbed.solution.bound_us)
    # A point that the clock ended depends on the machine, so it is only better than none.
    if climbed.start is not None and (climbed.solution.finished or search.best is None):
        return repair_from(search, climbed.start, most_work)
    return True


def limits_of(
    search: Search, lazy: LazyCuts | Windows, gap: float, open_gap: float, nodes: int = CUT_NODES
) -> Limits:
    # The next cut replaces the program: no need to be close. An exact one is the last.
    tolerance = max(gap, _GAP_PART * open_gap if open_gap < 1 else 0.0) / 4
    absolute_gap = 0.0 if lazy.is_exact else tolerance * COST_SCALE
    most = stopping.LARGE_CUT_NODES if search.is_large else nodes
    return Limits(stopping.RELAXED.of(search.left_s), absolute_gap=absolute_gap, node_limit=most)


def targets_of(search: Search, parts: Sequence[float] = TARGETS) -> list[int]:
    """Budgets that have so much of the room above the largest working set."""
    problem = search.problem
    least_bytes = largest_working_set_bytes(problem) + problem.resident_bytes
    return [least_bytes + int(part * (search.budget_bytes - least_bytes)) for part in parts]


def best_cut(search: Search, plain: State, program_at: Callable[[int], CutProgram]) -> int | None:
    """The op whose cut has the highest relaxed bound; None if one proves that nothing fits."""
    best: tuple[float, int] | None = None
    for t in _candidate_cuts(search, plain):
        if search.out_of_time() and best is not None:
            break
        bound_us = program_at(t).relaxed(stopping.BEST_CUT.of(search.left_s)).bound_us
        if bound_us == float("inf"):
            search.proved_infeasible = True
            search.message = f"more must be live while {search.graph.ops[t].name} runs"
            return None
        search.raise_bound(bound_us)
        if best is None or bound_us > best[0]:
            best = bound_us, t
    return best[1] if best else None


def _candidate_cuts(search: Search, plain: State) -> list[int]:
    problem = search.problem
    peak_bytes = plain.peak_bytes[: problem.n_ops]
    fullest = int(np.argmax(peak_bytes))
    start = problem.n_forward
    # Beside the right place the bound can be nothing. After the loss, values wait for backward.
    near = [fullest, fullest - 1, fullest + 1, fullest + 2, *range(start - 1, start + 4)]
    # Near the least budget what one op needs decides: a U-Net's bound went from 12 to 22 %.
    near += sorted(range(problem.n_ops), key=lambda t: -problem.working_set_bytes[t])[:_WIDEST]
    inside = [t for t in dict.fromkeys(near) if 0 <= t < problem.n_ops]
    over = [t for t in inside if peak_bytes[t] > search.budget_bytes]  # others say nothing
    return over or [fullest]


def _has_worked(search: Search, most_work: int) -> bool:
    """Whether there is a schedule, and repairs took so much that others may find better."""
    return search.best is not None and search.work > most_work


def repair_from(
    search: Search, start: State, most_work: float = float("inf"),
    powers: Sequence[float] = _POWERS,
) -> bool:  # fmt: skip
    """Offer repairs of `start`; False when `search.work` comes to `most_work`."""
    enough_work = stopping.REPAIRS_OF_A_START.from_now(search.work)
    for power in powers:
        if search.out_of_time() or _has_worked(search, enough_work):
            break
        state = start.copy()
        if Repair(state, search.budget_bytes, power, search, most_work=most_work).run():
            offer_filled(search, state)
        if search.work > most_work:
            return False
    return True


# Windows of cuts, where memory is full in several places and one cut says little.

_NEARLY_ALL = 0.9  # part of what all windows say together


def begin_window_cuts(search: Search, plain: State, gap: float, has_start: bool) -> Windows | None:
    """As `begin`; then windows if they say more than its cut, else that cut as the only one."""
    windows = windows_of(search.problem, search.budget_bytes, plain.peak_bytes)
    has_several = len(windows.parts) > 1 and not search.is_large
    # Repairs of the single cut's starts take long and found none on narrow graphs.
    is_begun, if_narrow = has_start or has_several, not search.is_large
    lazy = begin(search, plain, gap, has_start=is_begun, policies=True, if_narrow=if_narrow)
    if lazy is None:
        return None
    start = None
    if is_wide := if_narrow and search.is_open(max(gap, _HALF_WIDE)):
        start = _choose_cuts(search, lazy, gap)
    is_best = has_several and _say_more(search, windows, lazy, gap)
    if is_best:
        _take_relaxed(search, windows, gap)
    if has_several and search.best is None:
        offer_first(search, plain, is_patient=True)
    if is_best:
        return windows
    # Behind several cuts, lower targets of one took a second and found nothing.
    if not has_start and (search.best is None if is_wide else has_several):
        _offer_targets(search, lazy.cuts[0], gap)
    return Windows(search.problem, [lazy], lazy.bound_us, start)


def _choose_cuts(search: Search, lazy: LazyCuts, gap: float) -> State | None:
    """On layered graphs two cuts prove twice as much as one, and five four times.

    Returns the start of the last program.
    """
    start = None
    search.say("choosing more cuts")
    most, iterations = stopping.RELAXED_CUTS, stopping.RELAXED_ITERATIONS
    for start in lazy.climb_relaxed(most, iterations, stopping.RELAXED.of(search.left_s)):
        search.raise_bound(lazy.bound_us)
        # Far starts from a closer program: on random wiring 27 % of overhead, from one cut 55 %.
        repair_from(search, start, stopping.RELAXED_REPAIRS.from_now(search.work), RELAXED_POWERS)
        if not search.is_open(gap):
            break
    return start


def _say_more(search: Search, windows: Windows, lazy: LazyCuts, gap: float) -> bool:
    """Climb each of the windows once; whether their bound is above that of `lazy`."""
    if not search.is_open(gap):
        return False
    relaxed_us = windows.relaxed_us(stopping.RELAXED.of(search.left_s))
    if max(relaxed_us) >= _NEARLY_ALL * sum(relaxed_us):  # one says nearly all: a cut
        return False
    if windows.base_us + sum(relaxed_us) < lazy.bound_us:  # what few cuts prove in less time
        return False
    for _ in range(len(windows.parts)):
        if not search.is_open(gap):
            return False
        search.say(f"{len(windows.parts)} windows of cuts")
        limits = limits_of(search, windows, gap, search.gap, stopping.FIRST_CUT_NODES)
        climbed = windows.climb(replace(limits, time_limit_s=stopping.CUTS.of(search.left_s)))
        offer_climbed(search, climbed, stopping.FIRST_REPAIRS.from_now(search.work))
    return windows.bound_us > lazy.bound_us


def _take_relaxed(search: Search, windows: Windows, gap: float) -> None:
    for target_bytes in targets_of(search):
        if search.best is not None or not search.is_open(gap):
            return
        search.say(f"start of windows for {target_bytes} bytes")
        start = windows.relaxed_start(target_bytes, stopping.RELAXED.of(search.left_s))
        if start is not None:
            repair_from(search, start, stopping.FIRST_REPAIRS.from_now(search.work))
