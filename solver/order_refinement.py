"""Another order for all runs of a schedule, repeated ones too, that leaves bytes to spare.

Every run counts as an op of its own, whose results only those read that read them in the
schedule; so its recomputations stay what they are while the order is annealed
(`order_annealing`). What that frees, a solve in the new order of first runs puts to use.
Source: alternating between order and recomputation as FastSA (S. Imanishi, Z. Xu, A. Sasaki,
"Simulated Annealing for Memory-Efficient Rematerialization", NeurIPS 2023) anneals both.
Cost: as `reorder`. Shortcomings: a value that an op of several results makes again while it
is live counts as if it were made anew; the judge has the last word.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from remat.solver.live_curve import LiveCurve, Lived, OpFacts, with_end_of_forward
from remat.solver.order_annealing import Cooling, anneal
from remat.solver.ordering import predecessors
from remat.solver.problem import Problem
from remat.solver.sequence import end_of_forward

MOVES_PER_RUN = 200
MOST_MOVES = 150_000
HOTTEST, COLDEST = 4.0, 0.05
"""Temperatures, in mean bytes of a value: low, so that the order is improved and not replaced."""


def roomier_sequence(
    problem: Problem,
    sequence: Sequence[int],
    limit_bytes: int,
    *,
    seed: int = 0,
    time_limit_s: float = 60.0,
) -> list[int]:
    """The runs of `sequence` in an order that is over `limit_bytes` by less, or the same."""
    facts = run_facts(problem, sequence)
    mean_bytes = sum(problem.size_bytes) / max(problem.n_values, 1) or 1.0
    moves = min(MOVES_PER_RUN * len(sequence), MOST_MOVES)
    cooling = Cooling(moves, HOTTEST * mean_bytes, COLDEST * mean_bytes)
    curve = LiveCurve(facts, range(len(sequence)), limit_bytes)
    order = anneal(curve, cooling, random.Random(seed), time_limit_s)
    return [sequence[run] for run in order]


def run_facts(problem: Problem, sequence: Sequence[int]) -> OpFacts:
    """What an order of the runs of `sequence` needs to know, each an op of its own."""
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
