"""What checkpoints of the user's own do in eager, as ops of the graph of the unmodified step."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph, Value

DROPOUTS = ("aten.native_dropout.default", "remat.dropout.default")
MASK = 1
"""The place of its mask among a dropout's results."""
STATE = "remat.state_of_checkpoint"
CPU_STATE_BYTES = 5056
"""What `torch.get_rng_state()` takes. That of a CUDA device is kept on the host, by eager too."""


def with_own_checkpoints(graph: TrainingGraph, values: dict[str, Value]) -> Iterator[Op]:
    """The ops of a step, those that checkpoints cover as eager runs them there.

    Each checkpoint keeps the state of the random stream where it begins, from then until backward
    is through with it. Its ops may run again, and need no states of their own.

    Parameters
    ----------
    values : by name, which are changed with the ops.
    """
    begun: set[int] = set()
    until = _last_readers(graph)
    for op in graph.ops:
        if not op.checkpoint:
            yield op
            continue
        for name in op.inputs:
            if values[name].kind == "rng_state":
                values[name] = msgspec.structs.replace(values[name], size_bytes=0)
        op = msgspec.structs.replace(op, pinned="")
        if graph.device != "cpu":
            yield op
            continue
        if op.checkpoint not in begun:
            begun.add(op.checkpoint)
            state = _state_kept(op.checkpoint, until.get(op.checkpoint, ""))
            values[state.name] = state
            yield Op(state.name, STATE, "forward", (), (state.name,), price=op.price)
            op = msgspec.structs.replace(op, inputs=(*op.inputs, state.name))
        yield from _masked_apart(op, values)


def _last_readers(graph: TrainingGraph) -> dict[int, str]:
    """For each checkpoint the op of backward that is the last to read what it made."""
    made = {name: op.checkpoint for op in graph.ops if op.checkpoint for name in op.outputs}
    return {
        made[name]: op.name
        for op in graph.ops
        if op.phase == "backward"
        for name in op.inputs
        if name in made
    }


def _state_kept(checkpoint: int, until: str) -> Value:
    name, size = f"state_of_checkpoint_{checkpoint}", CPU_STATE_BYTES
    return Value(name, size, name, "rng_state", "uint8", (size,), held_until=until)


def _masked_apart(op: Op, values: dict[str, Value]) -> Iterator[Op]:
    """A dropout as the two ops that it is on a CPU: a mask is drawn, then multiplied by.

    Where backward wants the mask alone, a second run stops between them.
    """
    if op.target not in DROPOUTS or len(op.outputs) != MASK + 1:
        yield op
        return
    result, mask = op.outputs
    yield msgspec.structs.replace(op, outputs=(mask,))
    name = f"{op.name}_masked"
    values[result] = msgspec.structs.replace(values[result], producer=name)
    yield Op(
        name, "aten.mul.Tensor", "forward", (op.inputs[0], mask), (result,),
        price=op.price, checkpoint=op.checkpoint, module=op.module, source=op.source,
    )  # fmt: skip
