"""Orders of first computations: which are allowed, and the graph in another one.

Solvers work in the order of the graph they are given. So a free order is a graph with its
ops put in another order: a schedule of one is a schedule of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule

Order = tuple[int, ...]


def predecessors(graph: TrainingGraph) -> list[list[int]]:
    """For each op the ops that must first run before it.

    The producers of what it reads; for ops that draw random numbers or have effects, the one
    captured before; and for backward ops the one that opens backward. That all of forward
    comes before backward is left to `is_allowed`: as edges it would be quadratic.
    """
    before = [
        list(dict.fromkeys(graph.op_index[p] for v in op.inputs if (p := producer(graph, v))))
        for op in graph.ops
    ]
    for first, following in pairwise(graph.ordered_ops):
        before[graph.op_index[following]].append(graph.op_index[first])
    opening = [i for i, op in enumerate(graph.ops) if op.target == "remat.tangents"]
    for i, op in enumerate(graph.ops):
        if op.phase == "backward" and i not in opening:
            before[i] += opening
    return before


def producer(graph: TrainingGraph, value: str) -> str:
    """Name of the op that creates `value`, empty if it is resident."""
    return graph.value_by_name[value].producer


def is_allowed(graph: TrainingGraph, order: Sequence[int]) -> bool:
    """Whether first computations may come in `order`."""
    if sorted(order) != list(range(len(graph.ops))):
        return False
    position = {op: i for i, op in enumerate(order)}
    if any(op >= graph.n_forward for op in order[: graph.n_forward]):
        return False
    before = predecessors(graph)
    return all(position[b] < position[op] for op in order for b in before[op])


def reordered(graph: TrainingGraph, order: Sequence[int]) -> TrainingGraph:
    """`graph` with its ops in `order`.

    Raises
    ------
    SolverError : some op would come before one that it must follow.
    """
    if not is_allowed(graph, order):
        raise SolverError(f"the ops of {graph.name} cannot run in this order")
    return msgspec.structs.replace(graph, ops=tuple(graph.ops[i] for i in order))


def for_graph(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """`schedule`, made for `graph` in another order, as one of `graph`."""
    return msgspec.structs.replace(
        Schedule.for_graph(graph, schedule.steps),
        budget_bytes=schedule.budget_bytes, solver=schedule.solver, options=schedule.options,
    )  # fmt: skip
