"""The memory of the step in eager, without temporaries of kernels that a trace takes apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from remat.graph_capture.distributed.sharding import element_bytes
from remat.graph_capture.graph import TANGENTS, WRITES_FIRST, Op, TrainingGraph, Value

_DROPOUTS = ("aten.native_dropout.default", "remat.dropout.default")
_MASK = 1  # the place of its mask among a dropout's results
_STATE = "remat.state_of_checkpoint"
CPU_STATE_BYTES = 5056  # of `torch.get_rng_state()`; a CUDA device's is on the host in eager, too


def _with_own_checkpoints(graph: TrainingGraph, values: dict[str, Value]) -> Iterator[Op]:
    """Ops that checkpoints cover as eager runs them. Each checkpoint keeps a random state from its
    begin to its end in backward. `values`, by name, are changed too."""
    begun: set[int] = set()
    until = _last_readers(graph)
    for op in graph.ops:
        if not op.checkpoint:
            yield op
            continue
        for read in op.inputs:  # its ops run again from the checkpoint's state
            if values[read].kind == "rng_state":
                values[read] = replace(values[read], size_bytes=0)
        op = replace(op, no_recompute="")
        if graph.device != "cpu":  # eager keeps that device's state on the host
            yield op
            continue
        if op.checkpoint not in begun:
            begun.add(op.checkpoint)
            name, size = f"state_of_checkpoint_{op.checkpoint}", CPU_STATE_BYTES
            last = until.get(op.checkpoint, "")
            kept = Value(name, size, name, "rng_state", "uint8", (size,), held_until=last)
            values[name] = kept
            yield Op(name, _STATE, "forward", (), (name,), cost_origin=op.cost_origin)
            op = replace(op, inputs=(*op.inputs, name))
        yield from _masked_apart(op, values)


def _last_readers(graph: TrainingGraph) -> dict[int, str]:
    """For each checkpoint the op of backward that is the last to read what it made."""
    made = {name: op.checkpoint for op in graph.ops if op.checkpoint for name in op.outputs}
    backward = (op for op in graph.ops if op.phase == "backward")
    return {made[name]: op.name for op in backward for name in op.inputs if name in made}


def _masked_apart(op: Op, values: dict[str, Value]) -> Iterator[Op]:
    if op.target not in _DROPOUTS or len(op.outputs) != _MASK + 1:
        yield op
        return
    # On a CPU a mask is drawn, then multiplied by; for the mask alone a second run stops there.
    result, mask = op.outputs
    yield replace(op, outputs=(mask,))
    name = f"{op.name}_masked"
    values[result] = replace(values[result], producer=name)
    yield Op(
        name, "aten.mul.Tensor", "forward", (op.inputs[0], mask), (result,),
        cost_origin=op.cost_origin, checkpoint=op.checkpoint, module=op.module, source=op.source,
    )  # fmt: skip


_EAGER_SIZES = "room as eager takes it"  # marks a graph with the sizes of `baseline_graph`


def with_eager_sizes(graph: TrainingGraph) -> TrainingGraph:
    """`graph` with the sizes of values that the unmodified module has."""
    values = _with_wide_masks(graph)  # eager dropout's CPU mask has the input's dtype
    # Autograd adds a gradient to a view in a new tensor. No other difference is known.
    sizes = {value.name: value.size_bytes for value in graph.values}
    ops = tuple(
        replace(op, workspace_bytes=op.workspace_bytes + sizes[op.inputs[0]])
        if op.no_recompute == WRITES_FIRST
        else op
        for op in graph.ops
    )
    if values == graph.values and ops == graph.ops:  # the same, with what solvers found about it
        return graph
    return replace(graph, values=values, ops=ops)


def baseline_graph(graph: TrainingGraph) -> TrainingGraph:
    """`with_eager_sizes`, for the step in which ops run when eager runs them, and no others."""
    return with_eager_writes(with_eager_sizes(graph))


def with_eager_writes(eager: TrainingGraph) -> TrainingGraph:
    """A graph of `with_eager_sizes`, for the step in which ops run when eager runs them."""
    values = {value.name: value for value in eager.values}
    ops = tuple(_with_own_checkpoints(eager, values))
    _write_over(eager, values)  # what is written over another value takes no room
    if tuple(values.values()) == eager.values and ops == eager.ops:
        return eager
    return replace(  # another hash, so that no schedule is replayed on the sizes of the other graph
        eager, ops=ops, values=tuple(values.values()), inputs=(*eager.inputs, _EAGER_SIZES)
    )


def _write_over(graph: TrainingGraph, values: dict[str, Value]) -> None:
    """Where eager writes B into the storage of A, keep A until the last use of B."""
    index = graph.op_index
    last_use = {name: op.name for op in graph.ops for name in (*op.inputs, *op.outputs)}
    age = {value.name: i for i, value in enumerate(graph.values)}
    for value in graph.values:
        root = value
        # A file may name what is not there, or go round in a circle.
        while age.get(root.written_over, len(age)) < age[root.name]:
            root = values[root.written_over]
        if root is value:
            continue
        values[value.name] = replace(values[value.name], size_bytes=0)
        until = [values[root.name].held_until, last_use.get(value.name, ""), value.held_until]
        last = max(until, key=lambda name: index.get(name, -1))
        if root.producer:
            values[root.name] = replace(values[root.name], held_until=last)


def _with_wide_masks(graph: TrainingGraph) -> tuple[Value, ...]:
    if graph.device != "cpu":
        return graph.values
    wide: dict[str, int] = {}
    for op in graph.ops:
        if op.target in _DROPOUTS and len(op.outputs) > _MASK:
            result, mask = (graph.value_by_name[name] for name in op.outputs[:2])
            wide[mask.name] = math.prod(mask.shape) * element_bytes(result.dtype)
    return tuple(replace(v, size_bytes=wide[v.name]) if v.name in wide else v for v in graph.values)


# A check keeps what eager saves for backward off the device, where the unmodified step is larger
# than the budget (`rewriter/checking/off_device.py`). It leaves with its last use in forward, and
# comes back for each node of autograd that reads it. Not predicted: variables that hold it longer,
# which a trace does not tell from autograd.

LEAST_BYTES = 1024  # what is smaller stays on the device
_BACK = "remat.back"
_OFTEN = 2  # a node of autograd runs an op so often at most: a product has two gradients


def with_saved_elsewhere(graph: TrainingGraph) -> tuple[TrainingGraph, int]:
    """`graph` with what eager saves kept elsewhere, and the bytes of that."""
    moved = {value.name: value for value in _moved(graph)}
    made, ops = list[Value](), list[Op]()
    for together in _nodes(graph):
        back = _back(together, moved)
        made += back.values()
        ops += (Op(one.producer, _BACK, "backward", (), (one.name,)) for one in back.values())
        for op in together:
            inputs = tuple(back[name].name if name in back else name for name in op.inputs)
            ops.append(replace(op, inputs=inputs))
    backward = {op.name for op in graph.ops if op.phase != "forward"}
    late = {name for name, value in moved.items() if value.held_until in backward}
    kept = [replace(v, held_until="") if v.name in late else v for v in graph.values]
    changed = replace(graph, ops=tuple(ops), values=(*kept, *made))
    return changed, sum(value.size_bytes for value in moved.values())


def _nodes(graph: TrainingGraph) -> Iterator[list[Op]]:
    """The ops in turn, those together that may be one node of autograd."""
    together: list[Op] = []
    runs: Counter[str] = Counter()
    for op in graph.ops:
        # Which ops a node consists of is not known, but that they have one line in one module.
        is_alike = together and _line_of(together[0]) == _line_of(op) and runs[op.target] < _OFTEN
        if together and not is_alike:
            yield together
            together, runs = [], Counter()
        together.append(op)
        runs[op.target] += 1
    if together:
        yield together


def _line_of(op: Op) -> tuple[str, ...]:
    return op.phase, op.module, op.source, TANGENTS if op.target == TANGENTS else ""


def _moved(graph: TrainingGraph) -> Iterator[Value]:
    forward = {name for op in graph.ops if op.phase == "forward" for name in op.outputs}
    read = {name for op in graph.ops if op.phase == "backward" for name in op.inputs}
    covered = (op for op in graph.ops if op.checkpoint)  # checkpoints keep it in Python: it stays
    stays = {name for op in covered for name in (*op.inputs, *op.outputs)}
    stays.update(graph.outputs, graph.forward_outputs)
    for value in graph.values:
        is_saved = value.name in forward and value.name in read and value.name not in stays
        if is_saved and value.size_bytes >= LEAST_BYTES:
            yield value


def _back(together: list[Op], moved: dict[str, Value]) -> dict[str, Value]:
    """For what the ops of one group read of what was moved: the values that come back for them."""
    first = together[0]
    if first.phase != "backward" or first.target == TANGENTS:
        return {}
    return {
        name: replace(
            # A node has all that it saved for as long as it runs.
            moved[name], name=f"{name} for {first.name}", held_until=together[-1].name,
            producer=f"{name} comes back for {first.name}", written_over="",
        )
        for name in dict.fromkeys(name for op in together for name in op.inputs if name in moved)
    }  # fmt: skip


# One training graph made from another, as that with regions in chunks from the captured one.


def changes_between(
    before: TrainingGraph, after: TrainingGraph
) -> tuple[tuple[str, ...], tuple[tuple[str, Op], ...]]:
    index, last = before.op_index, -1
    added, waiting, same = list[tuple[str, Op]](), list[Op](), set[str]()
    for op in after.ops:
        at = index.get(op.name, -1)
        if at > last and before.ops[at] == op:  # what stays keeps its order
            added += [(op.name, one) for one in waiting]
            waiting, last = [], at
            same.add(op.name)
        else:
            waiting.append(op)
    added += [("", one) for one in waiting]
    return tuple(op.name for op in before.ops if op.name not in same), tuple(added)


def with_ops_replaced(
    graph: TrainingGraph, dropped: Iterable[str], added: Iterable[tuple[str, Op]],
    made: Iterable[Value],
) -> TrainingGraph:  # fmt: skip
    """`added` ops, which make `made`, stand in the places of those dropped, each with the name of
    the op that follows it, "" at the end. No region is left."""
    gone, own = set(dropped), {value.name: value for value in made}
    at: dict[str, list[Op]] = {}
    for place, op in added:
        at.setdefault(place, []).append(op)
    kept = [op for op in graph.ops if op.name not in gone]
    ops = (*(one for op in kept for one in (*at.get(op.name, ()), op)), *at.get("", ()))
    values = (v for v in graph.values if v.producer not in gone and v.name not in own)
    return replace(
        graph,
        ops=ops,
        values=(*values, *own.values()),
        regions=(),
        captured_us=graph.base_us,  # overheads go on being stated over the captured step
    )
