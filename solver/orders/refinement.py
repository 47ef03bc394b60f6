"""Another order for all runs of a schedule, repeated ones too, that leaves bytes to spare.

Every run counts as an op of its own. Its results have the readers that they have in the
schedule. So the recomputations stay what they are while the order is annealed (`annealing`), at
low temperature. A solve in the new order of first runs begins from those runs, and uses the room
that the new order has made.
Source: alternating between order and recomputation as FastSA (S. Imanishi, Z. Xu, A. Sasaki,
"Simulated Annealing for Memory-Efficient Rematerialization", NeurIPS 2023) anneals both.
Cost: as `reorder`. Shortcomings: a value that an op of several results makes again while it
is live counts as if it were made anew; the judge has the last word.

Tried and not kept: one annealing over order and recomputation at once. Its moves take a run
elsewhere, alone or with what it needs, add a run before a reader, or leave one out. Its energy
is the time plus a price for bytes over the budget, and a small price for the last few below it,
without which nothing lowers a long full stretch. Compiled with Numba it tried some million moves
a second, thirty times as many as `annealing`. At 80 % of the peak, on graphs given layer by
layer, it came to 2.9-3.0 % on 500 ops and 1.9 % on 1,000 within 90 s; the turns above come to
2.85 and 1.77 %. Started from these, with moves confined to windows of 40 to 300 runs, it came to
2.83 and 1.74 % in another half minute: it would be a last step, not another start.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.clock import Clock
from remat.solver.ordering import Order, predecessors, reordered
from remat.solver.orders.annealing import Cooling, anneal
from remat.solver.orders.live_curve import LiveCurve, Lived, OpFacts, with_end_of_forward
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.sequence import end_of_forward, ops_of, schedule_of
from remat.solver.stopping import DROPPED_RUNS

MOVES_PER_RUN = 200
MOST_MOVES = 150_000
HOTTEST, COLDEST = 4.0, 0.05
"""Temperatures, in mean bytes of a value. They are low, to improve the order, not replace it."""


class Roomier(NamedTuple):
    """An order of first runs, and a schedule of the graph in that order."""

    order: Order
    schedule: Schedule


def roomier_start(
    graph: TrainingGraph, found: Result, tightness: float, *, seed: int, time_limit_s: float
) -> Roomier | None:
    """The runs of `found` in an order that aims for less than `tightness` of its budget.

    None if the order does not change, or does not fit the budget.
    """
    assert found.schedule is not None, "only a schedule can be refined"
    problem = Problem.of(graph)
    sequence = ops_of(problem, found.schedule)
    facts = run_facts(problem, sequence)
    limit_bytes = int(tightness * found.budget_bytes)
    order = roomier_order(facts, limit_bytes, _cooling(problem, len(sequence)), seed, time_limit_s)
    if LiveCurve(facts, order, 0).peak_bytes > found.budget_bytes:
        return None
    runs = [sequence[run] for run in order]
    return None if runs == sequence else _start_of(graph, runs)


def cheaper_start(
    graph: TrainingGraph, found: Result, *, seed: int, time_limit_s: float
) -> Roomier | None:
    """Leave out repeated runs of `found`, one by one, if another order of the rest fits.

    None if no run could be left out.
    """
    assert found.schedule is not None, "only a schedule can be refined"
    clock, source = Clock(time_limit_s), random.Random(seed)
    problem = Problem.of(graph)
    runs = ops_of(problem, found.schedule)
    is_better = False
    for _ in range(DROPPED_RUNS.most):
        repeated = _repeated(runs)
        left_s = clock.left_s
        if not repeated or left_s <= 0:
            break
        costs_us = [problem.cost_us[runs[i]] + 1e-9 for i in repeated]
        dropped = source.choices(repeated, costs_us)[0]
        fewer = runs[:dropped] + runs[dropped + 1 :]
        facts, cooling = run_facts(problem, fewer), _cooling(problem, len(fewer) // 8)
        order = roomier_order(facts, found.budget_bytes, cooling, source.randrange(1 << 30), left_s)
        if LiveCurve(facts, order, 0).peak_bytes <= found.budget_bytes:
            runs, is_better = [fewer[run] for run in order], True
    return _start_of(graph, runs) if is_better else None


def _repeated(runs: Sequence[int]) -> list[int]:
    """Positions of the runs that are not the first of their op."""
    seen: set[int] = set()
    return [i for i, op in enumerate(runs) if op in seen or seen.add(op)]


def roomier_order(
    facts: OpFacts, limit_bytes: int, cooling: Cooling, seed: int, time_limit_s: float
) -> Order:
    """An order of the runs that exceeds `limit_bytes` by less than the present one, if found."""
    runs = len(facts.before) - 1
    curve = LiveCurve(facts, range(runs), limit_bytes)
    return anneal(curve, cooling, random.Random(seed), time_limit_s)


def _cooling(problem: Problem, runs: int) -> Cooling:
    mean_bytes = sum(problem.size_bytes) / max(problem.n_values, 1) or 1.0
    moves = min(MOVES_PER_RUN * runs, MOST_MOVES)
    return Cooling(moves, HOTTEST * mean_bytes, COLDEST * mean_bytes)


def _start_of(graph: TrainingGraph, runs: Sequence[int]) -> Roomier:
    """The order is that of the first runs; the schedule is of the graph in that order."""
    order = tuple(dict.fromkeys(runs))
    place = {op: i for i, op in enumerate(order)}
    problem = Problem.of(reordered(graph, order))
    return Roomier(order, schedule_of(problem, [place[op] for op in runs]))


def run_facts(problem: Problem, sequence: Sequence[int]) -> OpFacts:
    """What an order of the runs of `sequence` needs to know; each run is an op of its own."""
    n_forward = end_of_forward(problem, sequence) + 1
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    maker: dict[int, int] = {}
    readers: dict[tuple[int, int], list[int]] = {}
    wanted: set[tuple[int, int]] = set()
    before: list[list[int]] = []
    for run, op in enumerate(sequence):
        reads = [(v, maker[v]) for v in problem.inputs[op]]
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
                readers[v, maker[v]].append(len(sequence))
            wanted.update((v, maker[v]) for v in problem.held)
    wanted.update((v, maker[v]) for v in problem.needs[problem.n_ops])
    for op, earlier in enumerate(predecessors(problem.graph)):
        before[first[op]] += [first[other] for other in earlier]
    values = [
        Lived(problem.size_bytes[v], run, tuple(found), (v, run) in wanted)
        for (v, run), found in readers.items()
    ]
    own = [problem.output_bytes[op] + problem.workspace_bytes[op] for op in sequence]
    joined = with_end_of_forward(before, n_forward)
    return OpFacts.made(joined, [*own, 0], values, n_forward, problem.resident_bytes)
