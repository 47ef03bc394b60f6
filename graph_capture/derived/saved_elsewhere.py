"""The step as eager runs it while what it saves for backward is kept off the device.

A check runs it so where the unmodified step is larger than the budget
(`rewriter/checking/elsewhere.py`). What forward makes leaves the device with its last use in
forward, and comes back for each node of autograd that reads it. Not predicted: variables that hold
it longer in forward, which a trace does not tell from autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph, Value

LEAST_BYTES = 1024
"""What is smaller stays on the device."""
_BACK = "remat.back"
_TANGENTS = "remat.tangents"
"""The op that opens backward, and no node of autograd."""
_OFTEN = 2
"""A node of autograd runs an op so often at most, as that of a product, which has two gradients."""


def with_saved_elsewhere(graph: TrainingGraph) -> tuple[TrainingGraph, int]:
    """`graph` with what eager saves kept elsewhere, and the bytes of that.

    What the user's checkpoints cover, and what these read, stays: they keep it in Python.
    """
    moved = {value.name: value for value in _moved(graph)}
    made: list[Value] = []
    ops: list[Op] = []
    for together in _nodes(graph):
        back = _back(together, moved)
        made += back.values()
        ops += _reading_back(together, back)
    backward = {op.name for op in graph.ops if op.phase != "forward"}
    values = (*(_let_go(value, moved, backward) for value in graph.values), *made)
    changed = msgspec.structs.replace(graph, ops=tuple(ops), values=values)
    return changed, sum(value.size_bytes for value in moved.values())


def _nodes(graph: TrainingGraph) -> Iterator[list[Op]]:
    """The ops in turn, those together that may be one node of autograd.

    Such a node has all that it saved for as long as it runs. Which ops it consists of is not known,
    but that they have one line in one module.
    """
    together: list[Op] = []
    runs: Counter[str] = Counter()
    for op in graph.ops:
        is_alike = together and _line_of(together[0]) == _line_of(op) and runs[op.target] < _OFTEN
        if together and not is_alike:
            yield together
            together, runs = [], Counter()
        together.append(op)
        runs[op.target] += 1
    if together:
        yield together


def _line_of(op: Op) -> tuple[str, ...]:
    return op.phase, op.module, op.source, _TANGENTS if op.target == _TANGENTS else ""


def _moved(graph: TrainingGraph) -> Iterator[Value]:
    forward = {name for op in graph.ops if op.phase == "forward" for name in op.outputs}
    read = {name for op in graph.ops if op.phase == "backward" for name in op.inputs}
    covered = (op for op in graph.ops if op.checkpoint)
    stays = {name for op in covered for name in (*op.inputs, *op.outputs)}
    stays.update(graph.outputs, graph.forward_outputs)
    for value in graph.values:
        is_saved = value.name in forward and value.name in read and value.name not in stays
        if is_saved and value.size_bytes >= LEAST_BYTES:
            yield value


def _let_go(value: Value, moved: dict[str, Value], backward: set[str]) -> Value:
    if value.name not in moved or value.held_until not in backward:
        return value
    return msgspec.structs.replace(value, held_until="")


def _back(together: list[Op], moved: dict[str, Value]) -> dict[str, Value]:
    """For what the ops of one group read of what was moved: the values that come back for them."""
    first = together[0]
    if first.phase != "backward" or first.target == _TANGENTS:
        return {}
    return {
        name: msgspec.structs.replace(
            moved[name], name=f"{name} for {first.name}", producer=_op_name(first, name),
            held_until=together[-1].name, written_over="",
        )
        for name in dict.fromkeys(name for op in together for name in op.inputs if name in moved)
    }  # fmt: skip


def _reading_back(together: list[Op], back: dict[str, Value]) -> Iterator[Op]:
    """The ops of a group, after those that bring back what they read."""
    for value in back.values():
        yield Op(
            name=value.producer, target=_BACK, phase="backward", inputs=(), outputs=(value.name,)
        )
    for op in together:
        inputs = tuple(back[name].name if name in back else name for name in op.inputs)
        yield msgspec.structs.replace(op, inputs=inputs)


def _op_name(first: Op, name: str) -> str:
    return f"{name} comes back for {first.name}"
