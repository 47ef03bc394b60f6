"""The schedule of a whole step whose blocks are rewritten one by one.

The forward of a block is one call, and so is its backward; each follows the block's own schedule.
Ops outside blocks run once. Values that cross from one call to another live as autograd has it:

- arguments, as long as the call that they are given to;
- gradients, as long as the backward that they are given to;
- what a backward reads of forward, until it is last read;
- buffers of communication, until the communication is done.

The simulator judges the schedule that is put together here, not those of the blocks. While it is
over the budget, the blocks get less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat.graph_capture.derived.communication import COMMUNICATION
from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.schedule import Compute, Free, Schedule, Step


@dataclass(frozen=True)
class _Item:
    """Steps that run as one call."""

    steps: tuple[Step, ...]
    is_forward: bool


def assembled(
    graph: TrainingGraph,
    steps_of: Mapping[str, tuple[Sequence[Step], Sequence[Step]]],
    path_of: Mapping[str, str],
) -> Schedule:
    """The schedule of the whole step.

    Parameters
    ----------
    graph : of the whole step; the ops of each block stand together in it.
    steps_of : by block, its steps in forward and in backward, in names of `graph`. They free only
        values that nothing outside the block sees.
    path_of : the block of each op that is in one.
    """
    items: list[_Item] = []
    begun: set[tuple[str, str]] = set()
    for op in graph.ops:
        path = path_of.get(op.name)
        is_forward = op.phase == "forward"
        if path is None:
            items.append(_Item((Compute(op.name),), is_forward))
        elif (path, op.phase) not in begun:
            begun.add((path, op.phase))
            items.append(_Item(tuple(steps_of[path][0 if is_forward else 1]), is_forward))
    return Schedule.for_graph(graph, _with_frees(graph, items), solver="blocks")


def _op(graph: TrainingGraph, name: str) -> Op:
    return graph.ops[graph.op_index[name]]


def _with_frees(graph: TrainingGraph, items: Sequence[_Item]) -> list[Step]:
    """All steps, and frees for the values that no block frees itself."""
    of_forward = {v for op in graph.ops if op.phase == "forward" for v in op.outputs}
    at_step: dict[tuple[int, int], list[str]] = {}
    at_end: dict[int, list[str]] = {}
    for value, (i, j) in _last_touches(graph, items).items():
        if (items[i].is_forward or value not in of_forward) and not _lets_go(graph, items[i], j):
            at_end.setdefault(i, []).append(value)
        else:
            at_step.setdefault((i, j), []).append(value)
    steps: list[Step] = []
    for i, item in enumerate(items):
        for j, step in enumerate(item.steps):
            steps.append(step)
            steps.extend(map(Free, at_step.get((i, j), ())))
        steps.extend(map(Free, at_end.get(i, ())))
    return steps


def _lets_go(graph: TrainingGraph, item: _Item, j: int) -> bool:
    """Whether a step is communication: it lets go of what it reads as soon as it is done."""
    if j >= len(item.steps):
        return False
    step = item.steps[j]
    return isinstance(step, Compute) and _op(graph, step.op).target in COMMUNICATION


def _last_touches(graph: TrainingGraph, items: Sequence[_Item]) -> dict[str, tuple[int, int]]:
    """For each value that is to be freed: the item and the step that last make or read it."""
    lasting = {value.name for value in graph.values if not value.producer} | set(graph.outputs)
    lasting |= {step.value for item in items for step in item.steps if isinstance(step, Free)}
    last: dict[str, tuple[int, int]] = {}
    for i, item in enumerate(items):
        for j, step in enumerate(item.steps):
            if isinstance(step, Compute):
                op = _op(graph, step.op)
                touched = (value for value in (*op.inputs, *op.outputs) if value not in lasting)
                last.update(dict.fromkeys(touched, (i, j)))
    end = max((i for i, item in enumerate(items) if item.is_forward), default=0)
    for value in graph.forward_outputs:
        if value in last:
            last[value] = max(last[value], (end, len(items[end].steps)))
    return last
