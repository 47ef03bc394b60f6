"""What turns one training graph into another: ops that are dropped, and ops in their places."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph, Value


def changes_between(
    before: TrainingGraph, after: TrainingGraph
) -> tuple[tuple[str, ...], tuple[tuple[str, Op], ...]]:
    index, last = before.op_index, -1
    added: list[tuple[str, Op]] = []
    waiting: list[Op] = []
    same: set[str] = set()
    for op in after.ops:
        at = index.get(op.name, -1)
        # What stays keeps its order: an op that moved ahead is dropped and added.
        if at > last and before.ops[at] == op:
            added += [(op.name, one) for one in waiting]
            waiting, last = [], at
            same.add(op.name)
        else:
            waiting.append(op)
    added += [("", one) for one in waiting]
    return tuple(op.name for op in before.ops if op.name not in same), tuple(added)


def with_ops_replaced(
    graph: TrainingGraph,
    dropped: Iterable[str],
    added: Iterable[tuple[str, Op]],
    made: Iterable[Value],
) -> TrainingGraph:
    """`graph` without the ops of `dropped`; `added` ops, which make `made`, stand in their places.

    Each comes with the name of the op that follows it, "" at the end. No region is left.
    """
    gone, own = set(dropped), {value.name: value for value in made}
    at: dict[str, list[Op]] = {}
    for place, op in added:
        at.setdefault(place, []).append(op)
    kept = [op for op in graph.ops if op.name not in gone]
    ops = (*(one for op in kept for one in (*at.get(op.name, ()), op)), *at.get("", ()))
    values = (v for v in graph.values if v.producer not in gone and v.name not in own)
    return msgspec.structs.replace(
        graph,
        ops=ops,
        values=(*values, *own.values()),
        regions=(),
        # Overheads go on being stated over the captured step.
        captured_us=graph.base_us,
    )
