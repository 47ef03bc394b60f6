"""A bound on time for every order of first computations: one cut, by ancestry.

Source: the cut of Checkmate's program (Jain et al. 2020, https://arxiv.org/abs/1910.02653) with the
ops that must precede an op, and those that must follow it, in place of what comes before and after.
When op t first runs, all that must precede it has run and nothing that must follow it has. So what
the latter read of the former is carried past t or computed again. Other ops are left out: what
remains is a graph of its own, and its cut at t is a `CutProgram`. On forward and backward graphs
the bound equals that in captured order as a rule. Cost: a few linear programs, then one small MIP.
Shortcomings: weak on wide graphs, where most ops neither precede nor follow a given one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import Op, TrainingGraph
from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import COST_SCALE, CutProgram
from remat.solver.bounds.least_peak import effort_for, least_peak_bound_bytes
from remat.solver.problem import Problem, inverted, predecessors
from remat.solver.search import Clock
from remat.solver.stopping import ANY_ORDER_NODES, RELAXED

_PLACES = 6  # ops whose linear program is solved; the best one's integer program too
_END_OF_FORWARD = "remat.end_of_forward"


@dataclass(frozen=True, slots=True)
class Ancestry:
    """For each op, as bits, the ops that must first run before it and those after it."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, graph: TrainingGraph) -> Ancestry:
        n, direct = len(graph.ops), predecessors(graph)
        forward = (1 << graph.n_forward) - 1  # bits of an int: unions are one operation
        backward = (1 << n) - 1 & ~forward
        before = [0 if op < graph.n_forward else forward for op in range(n)]
        after = [backward if op < graph.n_forward else 0 for op in range(n)]
        for op in range(n):
            for p in direct[op]:
                before[op] |= before[p] | 1 << p
        for op in reversed(range(n)):
            for p in direct[op]:
                after[p] |= after[op] | 1 << op
        return cls(before, after)


def free_bound_us(
    graph: TrainingGraph, budget_bytes: int, *, time_limit_s: float = 10.0, enough_us: float = inf
) -> float:
    """No schedule in any order takes less; infinite where nothing fits."""
    clock, ancestry = Clock(time_limit_s), Ancestry.of(graph)
    best: tuple[float, int] | None = None
    for t in _candidates(graph, ancestry, budget_bytes):
        left_s = clock.left_s
        # The first is solved however late it is: without it there is no bound.
        if best is not None and (best[0] >= enough_us or left_s <= 0):
            return max(best[0], graph.time_us)
        bound_us = FreeCut.at(graph, t, budget_bytes, ancestry).relaxed_us(RELAXED.of(left_s))
        if bound_us == inf:
            return bound_us
        if best is None or bound_us > best[0]:
            best = bound_us, t
    left_s = clock.left_s
    if best is None or best[0] >= enough_us or left_s <= 0:
        return max(best[0] if best else 0.0, graph.time_us)
    limits = Limits(left_s, absolute_gap=1e-4 * COST_SCALE, node_limit=ANY_ORDER_NODES)
    bound_us = FreeCut.at(graph, best[1], budget_bytes, ancestry).bound_us(limits)
    return max(bound_us, best[0], graph.time_us)  # it may end before its relaxation


def free_least_peak_bound_bytes(graph: TrainingGraph) -> int:
    # Without pinned ops and forward outputs the proof in `least_peak` needs no order.
    ops = tuple(msgspec.structs.replace(op, no_recompute="") for op in graph.ops)
    eased = Problem.of(msgspec.structs.replace(graph, ops=ops, forward_outputs=()))
    return least_peak_bound_bytes(eased, effort_for(eased))


@dataclass(frozen=True, slots=True)
class FreeCut:
    program: CutProgram
    left_out_us: float

    @classmethod
    def at(
        cls, graph: TrainingGraph, t: int, budget_bytes: int, ancestry: Ancestry | None = None
    ) -> FreeCut:
        ancestry = ancestry or Ancestry.of(graph)
        related = ancestry.before[t] | ancestry.after[t] | 1 << t
        part = _related_part(graph, t, related, ancestry.before[t])
        program = CutProgram(Problem.of(part), (part.op_index[graph.ops[t].name],), budget_bytes)
        left = [op.cost_us for i, op in enumerate(graph.ops) if not related >> i & 1]
        return cls(program, sum(left))

    def relaxed_us(self, time_limit_s: float) -> float:
        """Infinite where nothing fits."""
        return self.left_out_us + self.program.relaxed(time_limit_s).bound_us

    def bound_us(self, limits: Limits) -> float:
        return self.left_out_us + self.program.solve(limits).bound_us


def _related_part(graph: TrainingGraph, t: int, related: int, before: int) -> TrainingGraph:
    # A schedule of `graph` serves the related ops too.
    kept = [op for i, op in enumerate(graph.ops) if related >> i & 1]
    names = {v for op in kept for v in op.outputs}
    names.update(value.name for value in graph.values if not value.producer)
    ops = [msgspec.structs.replace(op, inputs=_within(op.inputs, names)) for op in kept]
    forward = (1 << graph.n_forward) - 1
    # Unless t is the last forward op in every order, an op that does nothing stands for the end.
    if t < graph.n_forward and forward & ~(before | 1 << t):
        end = sum(op.phase == "forward" for op in ops)
        ops.insert(end, Op(_END_OF_FORWARD, _END_OF_FORWARD, "forward", (), ()))
    return msgspec.structs.replace(
        graph,
        ops=tuple(ops),
        values=tuple(value for value in graph.values if value.name in names),
        forward_outputs=_within(graph.forward_outputs, names),
        outputs=_within(graph.outputs, names),
    )


def _within(wanted: Iterable[str], names: set[str]) -> tuple[str, ...]:
    return tuple(name for name in wanted if name in names)


def _candidates(graph: TrainingGraph, ancestry: Ancestry, budget_bytes: int) -> list[int]:
    """Ops past which most must be carried if nothing is computed again, fullest first."""
    load_bytes = crossing_bytes(graph, ancestry)
    over = load_bytes > budget_bytes - graph.resident.total_bytes
    return [int(t) for t in np.argsort(-load_bytes, kind="stable") if over[t]][:_PLACES]


def crossing_bytes(graph: TrainingGraph, ancestry: Ancestry) -> npt.NDArray[np.int64]:
    """For each op the bytes live while it first runs if every op runs once."""
    problem = Problem.of(graph)
    n = problem.n_ops
    load = np.array(problem.own_bytes[:n], np.int64)
    readers = inverted(problem.inputs, problem.n_values)
    everywhere, forward = (1 << n) - 1, (1 << problem.n_forward) - 1
    returned, wanted = frozenset(problem.forward_outputs), frozenset(problem.needs[n])
    for v, source in enumerate(problem.producer):
        needed = 0
        for op in readers[v]:
            needed |= ancestry.before[op] | 1 << op
        needed |= forward if v in returned else 0
        needed |= everywhere if v in wanted else 0
        after = ancestry.after[source] & needed
        packed = np.frombuffer(after.to_bytes((n + 7) // 8, "little"), np.uint8)
        live = np.unpackbits(packed, bitorder="little")[:n].astype(np.int64)
        load += np.int64(problem.size_bytes[v]) * live
    return load
