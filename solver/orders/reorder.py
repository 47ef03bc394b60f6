"""Another order of first computations, in which less has to be computed again.

Also called: memory-aware operator reordering, topological ordering for least peak memory.
Paper: B. Steiner et al., "OLLA: Optimizing the Lifetime and Location of Arrays to Reduce the
Memory Usage of Neural Networks", 2022, https://arxiv.org/abs/2210.12924, orders ops for the
least peak by a MILP; here list scheduling, then annealing (`list_order`, `annealing`).
Solves: an order for the step that runs every op once. `better_order` finds one in which that
step exceeds the limit by fewer bytes; `lowest_order` one in which its peak is lower. What runs
again in such an order is left to a solver, see `free_order`.
Optimal: where the step fits in the new order without computing anything again. Cost: some
seconds of annealing for each order. Shortcomings: what could run again is not looked at; a
graph that is nearly a chain, as most networks are, has no better order.
"""

from __future__ import annotations

import random

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.ordering import Order
from remat.solver.orders.annealing import Cooling, anneal
from remat.solver.orders.list_order import list_orders
from remat.solver.orders.live_curve import LiveCurve, OpFacts
from remat.solver.problem import Problem

MOVES_PER_OP = 400
MOST_MOVES = 300_000
HOTTEST, COLDEST = 64.0, 0.05
"""Temperatures, in mean bytes of a value; found on random layered graphs of 250 to 1,000 ops."""
PEAK_PARTS, PEAK_WEIGHT = (0.9, 0.8, 0.7), 80
"""For the order of lowest peak: shares of the given peak to aim for, and the peak's weight."""


def better_order(
    graph: TrainingGraph,
    budget_bytes: int,
    *,
    seed: int = 0,
    moves: int | None = None,
    weight: int = 5,
    time_limit_s: float = 60.0,
) -> Order | None:
    """An allowed order in which the ops, each run once, exceed `budget_bytes` by less.

    What counts is the sum of the excess over all ops, plus `weight` times its maximum. None if
    no such order was found.
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
    """An allowed order of lower peak than the given one, each op run once; None if none found."""
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
