"""Another order of first computations, in which less has to be computed again.

Paper: B. Steiner et al., "OLLA: Optimizing the Lifetime and Location of Arrays to Reduce the Memory
Usage of Neural Networks", 2022, https://arxiv.org/abs/2210.12924, orders ops for the least peak by
a MILP; here by list scheduling, then annealing. `better_order` finds one in which the step that
runs each op once exceeds the limit by fewer bytes, `lowest_order` one of lower peak. What runs
again is left to a solver. Cost: some seconds of annealing for each order. Shortcomings: a graph
that is nearly a chain, as most networks are, has no better order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.solver.orders.live_curve import (
    LiveCurve,
    OpFacts,
    OrderMove,
    ValueLifetime,
    with_end_of_forward,
)
from remat.solver.problem import Order, Problem, predecessors, reordered
from remat.solver.search import Clock, check_least
from remat.solver.state import last_forward_position, ops_of, schedule_of
from remat.solver.stopping import DROPPED_RUNS

# Simulated annealing (S. Kirkpatrick et al., 1983, https://doi.org/10.1126/science.220.4598.671):
# one op at a time goes to another place. The energy is the bytes over the limit, summed over the
# ops, plus `weight` times the most at any op. Some 40,000 moves a second.

_CHECKS_EVERY = 1000  # moves between two looks at the clock
_FULL_EVERY, _FULL_SHARE = 100, 0.7  # moves between looks at full places; share of moves from one


@dataclass(frozen=True, slots=True)
class _Cooling:
    moves: int
    hottest_bytes: float  # it falls geometrically to the last
    coldest_bytes: float
    weight: int = 5  # of the peak, in the energy


def _anneal(
    curve: LiveCurve, cooling: _Cooling, source: random.Random, time_limit_s: float
) -> tuple[int, ...]:
    """In place; the order of least energy seen."""
    clock, n_ops = Clock(time_limit_s), len(curve.order) - 1
    energy = curve.overload_bytes + cooling.weight * curve.worst_bytes
    best, best_energy = curve.ops(), energy
    if not n_ops or cooling.moves < 1:
        return best
    full: list[int] = []
    temperature = cooling.hottest_bytes
    factor = (cooling.coldest_bytes / cooling.hottest_bytes) ** (1 / cooling.moves)
    for tried in range(cooling.moves):
        if best_energy == 0 or (tried % _CHECKS_EVERY == 0 and clock.left_s < 0):
            break
        temperature *= factor
        if tried % _FULL_EVERY == 0:
            full = np.flatnonzero(curve.over_bytes).tolist()
        op = _op_to_move(curve, full, source)
        move = None if op == n_ops else _draw(curve, op, source)  # the end of forward is no op
        if move is None:
            continue
        reached = move.overload_bytes + cooling.weight * move.worst_bytes
        if reached > energy and source.random() >= math.exp((energy - reached) / temperature):
            continue
        curve.apply(move)
        energy = reached
        if energy < best_energy:
            best, best_energy = curve.ops(), energy
    return best


def _op_to_move(curve: LiveCurve, full: list[int], source: random.Random) -> int:
    """Mostly an op at a place over the limit; sometimes any op."""
    if full and source.random() < _FULL_SHARE:
        return curve.order[full[int(source.random() * len(full))]]
    return int(source.random() * (len(curve.order) - 1))


def _draw(curve: LiveCurve, op: int, source: random.Random) -> OrderMove | None:
    """Move `op` to a random place of its span, near ones more often; None if it has no other."""
    first, last = curve.span(op)
    place = curve.place[op]
    back, onward = place - first, last - place
    if not back + onward:
        return None
    is_onward = source.random() * (back + onward) >= back
    distance = int(((onward if is_onward else back) + 1) ** source.random())
    return curve.moved(op, place + distance if is_onward else place - distance)


# Orders by list scheduling: always the op that lets memory grow least, from the first op on, and
# once more from the last one back. J. R. Goodman, W.-C. Hsu, "Code scheduling and register
# allocation in large basic blocks", 1988, https://doi.org/10.1145/55364.55407, do so by registers.
# Cost: O(ops · ops that are ready). Shortcomings: looks one op ahead.


def list_orders(facts: OpFacts) -> Iterator[tuple[int, ...]]:
    """Two orders: one made onward, one made backward."""
    yield _onward(facts)
    yield _backward(facts)


def _onward(facts: OpFacts) -> tuple[int, ...]:
    has_run = bytearray(len(facts.before))

    def growth_bytes(op: int) -> int:
        spent = (s for s, others in facts.spendable[op] if all(has_run[o] for o in others))
        return facts.lasting_bytes[op] - sum(spent)

    picked = _ops_by_growth(facts.before, facts.after, has_run, growth_bytes, 1)
    return tuple(op for op in picked if op != len(facts.before) - 1)


def _backward(facts: OpFacts) -> tuple[int, ...]:
    is_placed = bytearray(len(facts.before))

    def growth_bytes(op: int) -> int:
        # Going back, results vanish and operands appear.
        begun = (s for s, others in facts.spendable[op] if not any(is_placed[o] for o in others))
        return sum(begun) - facts.lasting_bytes[op]

    picked = _ops_by_growth(facts.after, facts.before, is_placed, growth_bytes, -1)
    return tuple(op for op in picked[::-1] if op != len(facts.before) - 1)


def _ops_by_growth(
    needed: list[list[int]], enabled: list[list[int]], is_done: bytearray,
    growth_bytes: Callable[[int], int], sign: int,
) -> list[int]:  # fmt: skip
    missing = [len(ops) for ops in needed]
    ready = dict.fromkeys(op for op in range(len(needed)) if not missing[op])
    picked: list[int] = []
    while ready:
        op = min(ready, key=lambda op: (growth_bytes(op), sign * op))  # ties: captured order
        del ready[op]
        is_done[op] = 1
        picked.append(op)
        for other in enabled[op]:
            missing[other] -= 1
            if not missing[other]:
                ready[other] = None
    return picked


_MOVES_PER_OP = 400
_MOST_MOVES = 300_000
_HOTTEST, _COLDEST = 64.0, 0.05  # mean bytes of a value, from layered graphs of 250 to 1,000 ops
_PEAK_PARTS, _PEAK_WEIGHT = (0.9, 0.8, 0.7), 80  # shares of the given peak to aim for, its weight


def better_order(
    graph: TrainingGraph, budget_bytes: int, *, seed: int = 0, moves: int | None = None,
    weight: int = 5, time_limit_s: float = 60.0,
) -> Order | None:  # fmt: skip
    """One that exceeds the budget by less: summed, plus `weight` times the most; or None."""
    check_least(0, moves=moves or 0, weight=weight)
    facts = OpFacts.of(Problem.of(graph))

    def energy(order: Order) -> int:
        curve = LiveCurve(facts, order, budget_bytes)
        return curve.overload_bytes + weight * curve.worst_bytes

    given = tuple(range(len(graph.ops)))
    start = min((given, *list_orders(facts)), key=energy)
    wanted = _moves_for(graph) if moves is None else moves
    mean_bytes = sum(value.size_bytes for value in graph.values) / max(len(graph.values), 1) or 1.0
    cooling = _Cooling(wanted, _HOTTEST * mean_bytes, _COLDEST * mean_bytes, weight)
    curve = LiveCurve(facts, start, budget_bytes)
    found = _anneal(curve, cooling, random.Random(seed), time_limit_s)
    return found if energy(found) < energy(given) else None


def lowest_order(
    graph: TrainingGraph, *, seed: int = 0, moves: int | None = None, time_limit_s: float = 60.0
) -> Order | None:
    """An order of lower peak than the given one, each op run once; None if none is found."""
    facts = OpFacts.of(Problem.of(graph))
    given_bytes = lowest_bytes = LiveCurve(facts, range(len(graph.ops)), 0).peak_bytes
    lowest: Order | None = None
    wanted = _moves_for(graph) if moves is None else moves
    for part in _PEAK_PARTS:
        found = better_order(
            graph, int(part * given_bytes), seed=seed, moves=wanted // len(_PEAK_PARTS),
            weight=_PEAK_WEIGHT, time_limit_s=time_limit_s / len(_PEAK_PARTS),
        )  # fmt: skip
        if found is not None:
            peak_bytes = LiveCurve(facts, found, 0).peak_bytes
            if peak_bytes < lowest_bytes:
                lowest, lowest_bytes = found, peak_bytes
    return lowest


def _moves_for(graph: TrainingGraph) -> int:
    return min(_MOVES_PER_OP * len(graph.ops), _MOST_MOVES)


# Another order for all runs of a schedule. Every run counts as an op of its own, so recomputations
# stay what they are while the order is annealed at low temperature. A solve in the new order begins
# from those runs and uses its room. Source: FastSA (S. Imanishi, Z. Xu, A. Sasaki, "Simulated
# Annealing for Memory-Efficient Rematerialization", NeurIPS 2023) anneals both. Shortcomings: a
# value that an op of several results makes again while it is live counts as if made anew.
#
# Tried and not kept: one annealing over order and recomputation at once, a million moves a second
# with Numba. On layered graphs of 500 ops it came to 2.9 % in 90 s, where this comes to 2.85 %, and
# started from this to 2.83 %: it would be a last step, not another start.

_MOVES_PER_RUN = 200
_MOST_REFINEMENTS = 150_000
_HOTTEST_REFINEMENT, _COLDEST_REFINEMENT = 4.0, 0.05
"""Mean bytes of a value; low, to improve the order, not replace it."""


class Roomier(NamedTuple):
    """An order of first runs, and a schedule of the graph in that order."""

    order: Order
    schedule: Schedule


def roomier_start(
    graph: TrainingGraph, found: Result, tightness: float, *, seed: int, time_limit_s: float
) -> Roomier | None:
    """The runs of `found` in an order of more room; None if it does not change or fit."""
    assert found.schedule is not None, "only a schedule can be refined"
    problem = Problem.of(graph)
    sequence = ops_of(problem, found.schedule)
    facts = _run_facts(problem, sequence)
    limit_bytes = int(tightness * found.budget_bytes)  # room below the budget for the solve
    order = _roomier_order(facts, limit_bytes, _cooling(problem, len(sequence)), seed, time_limit_s)
    if LiveCurve(facts, order, 0).peak_bytes > found.budget_bytes:
        return None
    runs = [sequence[run] for run in order]
    return None if runs == sequence else _start_of(graph, runs)


def cheaper_start(
    graph: TrainingGraph, found: Result, *, seed: int, time_limit_s: float
) -> Roomier | None:
    """The runs of `found` without some of them; None if none could be left out."""
    assert found.schedule is not None, "only a schedule can be refined"
    clock, source = Clock(time_limit_s), random.Random(seed)
    problem = Problem.of(graph)
    runs = ops_of(problem, found.schedule)
    is_better = False
    for _ in range(DROPPED_RUNS.most):
        seen: set[int] = set()  # to find the runs that are not the first of their op
        repeated = [i for i, op in enumerate(runs) if op in seen or seen.add(op)]
        left_s = clock.left_s
        if not repeated or left_s <= 0:
            break
        # The dearer, the sooner; all weights must not be 0.
        costs_us = [problem.cost_us[runs[i]] + 1e-9 for i in repeated]
        dropped = source.choices(repeated, costs_us)[0]
        fewer = runs[:dropped] + runs[dropped + 1 :]
        facts, cooling = _run_facts(problem, fewer), _cooling(problem, len(fewer) // 8)
        drawn = source.randrange(1 << 30)
        order = _roomier_order(facts, found.budget_bytes, cooling, drawn, left_s)
        if LiveCurve(facts, order, 0).peak_bytes <= found.budget_bytes:
            runs, is_better = [fewer[run] for run in order], True
    return _start_of(graph, runs) if is_better else None


def _roomier_order(
    facts: OpFacts, limit_bytes: int, cooling: _Cooling, seed: int, time_limit_s: float
) -> Order:
    """One that exceeds `limit_bytes` by less than the present one, if found."""
    curve = LiveCurve(facts, range(len(facts.before) - 1), limit_bytes)
    return _anneal(curve, cooling, random.Random(seed), time_limit_s)


def _cooling(problem: Problem, runs: int) -> _Cooling:
    mean_bytes = sum(problem.size_bytes) / max(problem.n_values, 1) or 1.0
    moves = min(_MOVES_PER_RUN * runs, _MOST_REFINEMENTS)
    return _Cooling(moves, _HOTTEST_REFINEMENT * mean_bytes, _COLDEST_REFINEMENT * mean_bytes)


def _start_of(graph: TrainingGraph, runs: Sequence[int]) -> Roomier:
    """The order is that of the first runs; the schedule is of the graph in that order."""
    order = tuple(dict.fromkeys(runs))
    place = {op: i for i, op in enumerate(order)}
    problem = Problem.of(reordered(graph, order))
    return Roomier(order, schedule_of(problem, [place[op] for op in runs]))


def _run_facts(problem: Problem, sequence: Sequence[int]) -> OpFacts:
    """Of an order of the runs of `sequence`; each is an op of its own."""
    n_forward = last_forward_position(problem, sequence) + 1
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    maker: dict[int, int] = {}
    readers: dict[tuple[int, int], list[int]] = {}
    wanted: set[tuple[int, int]] = set()
    before: list[list[int]] = []
    for run, op in enumerate(sequence):
        reads = [(v, maker[v]) for v in problem.inputs[op]]  # made again, it is another one
        for instance in reads:
            readers[instance].append(run)
        before.append([made for _, made in reads] + ([last[op]] if op in last else []))
        first.setdefault(op, run)
        last[op] = run
        for v in problem.outputs[op]:
            maker[v] = run
            readers[v, run] = []
        if run == n_forward - 1:
            for v in problem.forward_outputs:
                readers[v, maker[v]].append(len(sequence))  # it comes behind all runs
            wanted.update((v, maker[v]) for v in problem.held)
    wanted.update((v, maker[v]) for v in problem.needs[problem.n_ops])
    for op, earlier in enumerate(predecessors(problem.graph)):  # others are ordered by reads
        before[first[op]] += [first[other] for other in earlier]
    values = [
        ValueLifetime(problem.size_bytes[v], run, tuple(found), (v, run) in wanted)
        for (v, run), found in readers.items()
    ]
    own_bytes = [*(problem.own_bytes[op] for op in sequence), 0]
    joined = with_end_of_forward(before, n_forward)
    return OpFacts.made(joined, own_bytes, values, n_forward, problem.resident_bytes)
