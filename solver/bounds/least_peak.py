"""Lower bounds on the peak: with and without recomputation of the outputs of the step.

Also called: regression search, backward pebbling. The floor is the largest sum of an op's working
set and the outputs made before it. The bound follows the red pebbles of J. Hong, H. Kung, "I/O
Complexity: The Red-Blue Pebble Game", 1981, https://doi.org/10.1145/800076.802486, backwards.
Proof: let op o be the last to make one of a set of values that are live at some moment. While o
ran, its inputs, outputs, workspace and the others were live: a lower bound. Just before, its inputs
and the others were live, so the same holds for that set. The bound is the least over all choices of
o, for any number of recomputations. That pinned ops run once, and their values wait, needs the
captured order of first computations; without pinned ops forward outputs alone need it. Cost: floor
O(ops + reads), bound O(effort · values + reads): it stops after `effort` sets.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Holding
from remat.schedules.schedule import Schedule
from remat.solver.problem import Problem
from remat.solver.search import Search, check_least
from remat.solver.stopping import REGRESSION

_MOST_MOMENTS = 200  # that the search goes back from: ends of phases, and those that need most
_SPECIAL_PART, _OTHER_PART = 4, 50  # of the effort left: one part for an end, for other moments


def floor_of(problem: Problem) -> Holding:
    """What any schedule in captured order needs that computes no output of the step again."""
    kept = set(problem.needs[problem.n_ops])
    made_bytes = 0
    best = Holding("", problem.resident_bytes)  # resident bytes included
    for t in range(problem.n_ops):
        # Outputs that op t reads are in its working set already.
        beside_bytes = sum(problem.size_bytes[v] for v in problem.needs[t] if v in kept)
        need_bytes = problem.working_set_bytes[t] + made_bytes - beside_bytes
        need_bytes += problem.resident_bytes
        if need_bytes > best.size_bytes:
            op = problem.graph.ops[t]
            best = Holding(op.name, need_bytes, op.module)
        made_bytes += sum(problem.size_bytes[v] for v in problem.outputs[t] if v in kept)
    return best


def least_peak_bound_bytes(problem: Problem, effort: int = REGRESSION.most) -> int:
    """The bound after `effort` sets; 0 leaves the largest set that one moment asks for."""
    check_least(0, effort=effort)
    return _Regression(problem).run(effort)


def effort_for(problem: Problem) -> int:
    return REGRESSION.at(problem.n_ops)


class _Open(NamedTuple):
    """What was live just before `op` ran, with `live` live after it; not explored yet."""

    peak_bytes: int  # in the order in which sets are explored
    total_bytes: int
    opened: int  # unique, so that `live` is never compared
    live: frozenset[int]
    op: int


class _Regression:
    """The search backwards; `best_bytes` is the bound so far, resident bytes left out."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.best_bytes, self.n_opened = problem, 0, 0
        early = (v for v in problem.held if problem.producer[v] < problem.n_forward)
        self.held = tuple(sorted(early))

    def run(self, effort: int) -> int:
        special = (self.problem.n_ops, self.problem.n_forward - 1)
        fullest = heapq.nlargest(
            _MOST_MOMENTS, self._moments(), key=lambda at: (at[1] in special, at[0])
        )
        self.best_bytes = max(peak_bytes for peak_bytes, _, _ in fullest)
        for _, t, live in fullest:
            share = effort // _SPECIAL_PART if t in special else effort // _OTHER_PART
            effort -= self._explore(live, min(max(share, 1), effort))
        return self.best_bytes + self.problem.resident_bytes

    def _moments(self) -> Iterator[tuple[int, int, frozenset[int]]]:
        """For the first run of each op, and the end: bytes, stage, and what is live before."""
        problem, n_ops, last_need = self.problem, self.problem.n_ops, self.problem.last_need
        waiting: dict[int, None] = {}
        for t in range(n_ops + 1):
            live = {*problem.needs[t], *(v for v in waiting if last_need[v] > t)}
            if t >= problem.n_forward:  # the caller has them once forward has ended
                live.update(self.held)
            if t < n_ops:
                # What pinned ops made waits for its last need.
                once = problem.outputs[t] if problem.no_recompute[t] else ()
                waiting = {v: None for v in (*waiting, *once) if last_need[v] > t}
            yield self._bytes(live) + problem.own_bytes[t], t, frozenset(live)

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self.problem.size_bytes[v] for v in values)

    def _explore(self, live: frozenset[int], most: int) -> int:
        """Returns how many sets were looked at."""
        seen = {live}
        waiting: list[_Open] = []
        self._expand(live, 0, waiting)
        for count in range(1, most):
            if not waiting:
                return count
            # Any schedule passes an open set.
            self.best_bytes = max(self.best_bytes, waiting[0].peak_bytes)
            state = heapq.heappop(waiting)
            before = self._before(state.live, state.op)
            if not before:  # a schedule can begin there, so nothing more is proved from this moment
                return count
            if before not in seen:
                seen.add(before)
                self._expand(before, state.peak_bytes, waiting)
        if most and waiting:
            self.best_bytes = max(self.best_bytes, waiting[0].peak_bytes)
        return most

    def _expand(self, live: frozenset[int], peak_bytes: int, waiting: list[_Open]) -> None:
        """Add one open set for each op that may have made the last of `live`."""
        problem = self.problem
        live_bytes = self._bytes(live)
        makers = Counter(problem.producer[v] for v in sorted(live))
        n_late = sum(n for op, n in makers.items() if op >= problem.n_forward)
        newest = max(makers, default=-1)
        for op in makers:
            # It ran before later ops, so it made no value after them.
            if problem.no_recompute[op] and op < newest:
                continue
            made = [v for v in problem.outputs[op] if v in live]
            fresh = {u for u in problem.inputs[op] if u not in live}
            if op >= problem.n_forward or n_late:  # the caller holds what forward returned
                fresh.update(h for h in self.held if h not in live or h in made)
            if fresh.issuperset(made):  # what it made was live before it ran too, so nothing is won
                continue
            total_bytes = live_bytes - self._bytes(made) + self._bytes(fresh)
            need_bytes = max(peak_bytes, total_bytes + problem.own_bytes[op], self.best_bytes)
            self.n_opened += 1
            heapq.heappush(waiting, _Open(need_bytes, total_bytes, self.n_opened, live, op))

    def _before(self, live: frozenset[int], op: int) -> frozenset[int]:
        """What was live just before `op` ran, where it made the last of `live`."""
        problem = self.problem
        before = live.difference(problem.outputs[op]).union(problem.inputs[op])
        producers = (problem.producer[v] for v in before)
        if op >= problem.n_forward or any(p >= problem.n_forward for p in producers):
            before = before.union(self.held)
        return before


LEAST_BOUND = "No schedule has a peak below"  # how the sentence with the bound begins


def prove_nothing_fits(search: Search) -> None:
    """Bound the least peak, in the search's order; note in `search` if nothing fits."""
    # Up to a second, so not where something fits.
    if search.best is not None or search.least_bound_bytes or search.left_s <= 0:
        return
    search.say("proving a bound on the least peak")
    problem = search.problem
    search.least_bound_bytes = least_peak_bound_bytes(problem, effort_for(problem))
    if search.least_bound_bytes > search.budget_bytes:
        search.proved_infeasible = True


def note_floor(search: Search) -> None:
    search.floor = floor_above(search.problem, search.budget_bytes)
    if search.floor is not None:
        search.note(floor_text(search.graph, search.floor, search.best))
    if search.best is None and search.least_bound_bytes:
        search.note(f"{LEAST_BOUND} {search.least_bound_bytes} bytes")


def floor_above(problem: Problem, budget_bytes: int) -> Holding | None:
    """The floor and the op that sets it; None where the budget is no lower."""
    floor = floor_of(problem)
    return floor if budget_bytes < floor.size_bytes else None


def floor_text(graph: TrainingGraph, floor: Holding, schedule: Schedule | None) -> str:
    place = f" ({floor.module})" if floor.module else ""
    at = f", set by op {floor.name}{place}" if floor.name else ""
    text = f"The budget is below the floor of {floor.size_bytes} bytes{at}"
    if schedule is None:
        return f"{text}: any schedule needs that, unless it computes outputs of the step again"
    runs = schedule.computations()
    makers = {graph.value_by_name[name].producer for name in graph.outputs} - {""}
    if not (count := sum(runs[maker] > 1 for maker in makers)):
        return f"{text}: another order of first computations avoids it"
    return f"{text}: so outputs of the step are recomputed, by {count} of {len(makers)} ops"
