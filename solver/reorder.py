"""Another order of first computations, in which less has to be computed again.

Also called: memory-aware operator reordering, topological ordering for least peak memory.
Paper: B. Steiner et al., "OLLA: Optimizing the Lifetime and Location of Arrays to Reduce the
Memory Usage of Neural Networks", 2022, https://arxiv.org/abs/2210.12924, orders ops for the
least peak by a MILP; here list scheduling, then annealing (`list_order`, `order_annealing`).
Solves: `better_order` an order in which the step that runs every op once is over the limit by
fewer bytes; `solve_free` the least time under a budget, first runs in any order.
Optimal: where the step fits in the new order without computing anything again, or where the
bound for every order (`free_cut`) is met. Cost: some seconds of annealing for each order, and
a fixed-order solve of each. Shortcomings: order and recomputation are chosen one after the
other; a graph that is nearly a chain, as most networks are, has no better order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.free_cut import free_bound_us
from remat.solver.list_order import list_orders
from remat.solver.live_curve import LiveCurve, OpFacts
from remat.solver.order_annealing import Cooling, anneal
from remat.solver.ordering import Order, for_graph, reordered
from remat.solver.problem import Problem
from remat.solver.result import Result, judged

SolveFixed = Callable[[TrainingGraph, int], Result]

MOVES_PER_OP = 400
MOST_MOVES = 300_000
HOTTEST, COLDEST = 64.0, 0.05
"""Temperatures, in mean bytes of a value; found on random layered graphs of 250 to 1,000 ops."""
PARTS = (1.0, 0.9)
"""Parts of the budget that orders aim for: to aim below it leaves room for recomputation."""
PEAK_PARTS, PEAK_WEIGHT = (0.9, 0.8, 0.7), 80
"""For the order of lowest peak: parts of the present peak to aim for, and the peak's weight."""


def better_order(
    graph: TrainingGraph,
    budget_bytes: int,
    *,
    seed: int = 0,
    moves: int | None = None,
    weight: int = 5,
    time_limit_s: float = 60.0,
) -> Order | None:
    """An allowed order whose ops, each run once, exceed `budget_bytes` by less; None if none is.

    What counts is the sum of the excess over all ops, plus `weight` times its maximum.
    Deterministic for a seed, unless the time limit ends it early.

    Raises
    ------
    SolverError : `moves` or `weight` is negative.
    """
    for name, number in (("moves", moves or 0), ("weight", weight)):
        if number < 0:
            raise SolverError(f"{name} must be 0 or more, not {number}")
    facts = OpFacts.of(Problem.of(graph))

    def energy(order: Order) -> int:
        curve = LiveCurve(facts, order, budget_bytes)
        return curve.overload_bytes + weight * curve.worst_bytes

    given = tuple(range(len(graph.ops)))
    start = min((given, *list_orders(facts)), key=energy)
    wanted = _moves_for(graph) if moves is None else moves
    mean_bytes = sum(value.size_bytes for value in graph.values) / max(len(graph.values), 1) or 1.0
    cooling = Cooling(wanted, HOTTEST * mean_bytes, COLDEST * mean_bytes, weight)
    curve = LiveCurve(facts, start, budget_bytes)
    found = anneal(curve, cooling, random.Random(seed), time_limit_s)
    return found if energy(found) < energy(given) else None


def lowest_order(
    graph: TrainingGraph, *, seed: int = 0, moves: int | None = None, time_limit_s: float = 60.0
) -> Order | None:
    """An allowed order of lower peak than the given one, each op run once; None if none is."""
    facts = OpFacts.of(Problem.of(graph))
    given_bytes = lowest_bytes = LiveCurve(facts, range(len(graph.ops)), 0).peak_bytes
    lowest: Order | None = None
    wanted = _moves_for(graph) if moves is None else moves
    for part in PEAK_PARTS:
        found = better_order(
            graph, int(part * given_bytes), seed=seed, moves=wanted // len(PEAK_PARTS),
            weight=PEAK_WEIGHT, time_limit_s=time_limit_s / len(PEAK_PARTS),
        )  # fmt: skip
        if found is not None:
            peak_bytes = LiveCurve(facts, found, 0).peak_bytes
            if peak_bytes < lowest_bytes:
                lowest, lowest_bytes = found, peak_bytes
    return lowest


def _moves_for(graph: TrainingGraph) -> int:
    return min(MOVES_PER_OP * len(graph.ops), MOST_MOVES)


def solve_free(
    graph: TrainingGraph,
    budget_bytes: int,
    solve_fixed: SolveFixed,
    *,
    given: Result | None = None,
    seed: int = 0,
    moves: int | None = None,
    time_limit_s: float = 60.0,
) -> Result:
    """The best of the given order and of better ones, each solved by `solve_fixed`.

    Never worse than `given`, the Result in the given order, solved for if it is not passed.
    The lower bound holds for every order. Where no order gives a schedule, `given` is returned.
    """
    free = FreeSearch(graph, budget_bytes, solve_fixed, seed, moves, time_limit_s)
    try:
        free.take(given or solve_fixed(graph, budget_bytes))
        free.try_orders()
    except KeyboardInterrupt:
        if free.first is None:
            raise
        free.cut_short, free.message = True, "interrupted: this is the best schedule until then"
    return free.result()


@dataclass(slots=True)
class FreeSearch:
    """One solve in a free order: the first Result, and the best so far."""

    graph: TrainingGraph
    budget_bytes: int
    solve_fixed: SolveFixed
    seed: int
    moves: int | None
    time_limit_s: float
    began_s: float = field(default_factory=time.monotonic)
    first: Result | None = None
    best: Result | None = None
    cut_short: bool = False
    message: str = ""

    @property
    def left_s(self) -> float:
        """Seconds left of the time limit."""
        return self.time_limit_s - (time.monotonic() - self.began_s)

    def take(self, found: Result) -> None:
        """Keep `found` if it is the first or the best."""
        self.first = self.first or found
        self.cut_short |= found.status == "time limit"
        if found.schedule is None:
            return
        if self.best is None or _key(found) < _key(self.best):
            self.best = found

    def try_orders(self) -> None:
        """Solve in one better order after the other, until nothing is computed again."""
        tried: set[Order] = set()
        for order in self._orders():
            if order is None or order in tried:
                continue
            tried.add(order)
            self.take(self.solve_fixed(reordered(self.graph, order), self.budget_bytes))

    def _orders(self) -> Iterator[Order | None]:
        """Candidates, while something is computed again and time is left."""
        for part in (*PARTS, 0.0):
            if self.best is not None and self.best.time_us <= self.graph.time_us * (1 + 1e-9):
                return
            if self.left_s <= 0:
                self.cut_short = True
                return
            if part:
                limit_bytes = int(part * self.budget_bytes)
                yield better_order(
                    self.graph, limit_bytes, seed=self.seed, moves=self.moves,
                    time_limit_s=self.left_s,
                )  # fmt: skip
            else:
                yield lowest_order(
                    self.graph, seed=self.seed, moves=self.moves, time_limit_s=self.left_s
                )

    def result(self) -> Result:
        """The best Result, as one of the graph in its given order, judged there."""
        assert self.first is not None
        if self.best is None or self.best.schedule is None:
            return self.first
        bound_us = self.graph.time_us
        if self.best.time_us > bound_us:
            limit_s = max(min(self.left_s, 10.0), 1.0)
            bound_us = free_bound_us(self.graph, self.budget_bytes, time_limit_s=limit_s)
            assert bound_us <= self.best.time_us * (1 + 1e-6), "a bound exceeds a schedule's time"
        return judged(
            self.graph,
            for_graph(self.graph, self.best.schedule),
            budget_bytes=self.budget_bytes,
            lower_bound_us=min(bound_us, self.best.time_us),
            wall_s=time.monotonic() - self.began_s,
            cut_short=self.cut_short,
            message=self.message,
        )


def _key(result: Result) -> tuple[float, int]:
    return result.time_us, result.peak_bytes
