"""The step of one rank: with what FSDP2 adds to it, gathered buffers, reductions and shards.

FSDP2 gathers a module's parameters right before its forward and its backward, and reduces its
gradients right after. When it does so is fixed, so it is part of the graph, not of the schedule.
Each is an op, pinned where it stands. Its buffer is a value, read by the op that lets go of it. As
workspaces of the ops beside them, buffers were wrong wherever an op of forward runs again in
backward. Solvers see these as any op; the knapsack over blocks is told what they hold live.

Their time is not predicted. Mixed precision policies are not counted. Where the loss is computed
outside the model, the last buffer is freed a little earlier than here.

Source: `torch.distributed.fsdp._fully_shard` of torch 2.13, read and measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from remat.graph_capture.derived.block_units import Unit, ops_by_block, with_units
from remat.graph_capture.derived.sharding import UNTIMED, Sharding, element_bytes
from remat.graph_capture.graph import Op, Phase, TrainingGraph, Value

GATHER, UNSHARD, RESHARD = "remat.all_gather", "remat.unshard", "remat.reshard"
COPY_IN, REDUCE = "remat.copy_in", "remat.reduce_scatter"
BEFORE_BLOCK, BEHIND_BLOCK = (GATHER, UNSHARD), (RESHARD, COPY_IN, REDUCE)
"""What runs right before a block's forward or backward, and right after."""
COMMUNICATION = (*BEFORE_BLOCK, *BEHIND_BLOCK)

GLOO_COPIES = 1
"""Copies of a whole buffer that gloo makes while it gathers or reduces. CPUs use gloo."""


@dataclass
class _Group:
    """Parameters that are gathered together: their bytes, without and with FSDP2's padding."""

    path: str
    parameters_bytes: int = 0
    gathered_bytes: int = 0
    gradients: list[Value] = field(default_factory=list[Value])


def sharded(graph: TrainingGraph, units: Sequence[Unit], sharding: Sharding) -> TrainingGraph:
    """`graph` as it runs under FSDP2, where each unit is sharded by itself, then the model.

    Parameters
    ----------
    graph : with `resident` counted for the sharding already, see `resident_bytes`.
    units : as of `with_units`, in the order of forward.
    """
    if sharding.kind != "fsdp2":
        return graph
    return _Fsdp(graph, units, sharding).graph()


class _Fsdp:
    """The timeline of FSDP2's buffers over the ops of a step."""

    def __init__(self, graph: TrainingGraph, units: Sequence[Unit], sharding: Sharding) -> None:
        self.given, self.units, self.sharding = graph, units, sharding
        self.unit_of = {
            i: k
            for k, unit in enumerate(units)
            for i in (*range(unit.start, unit.stop), *range(unit.back_start, unit.back_stop))
        }
        self.groups = [_Group(unit.path) for unit in units]
        self.root = _Group("")
        self._gather_parameters()
        self._sort_gradients()
        self.values: list[Value] = []
        self.shards: list[str] = []
        self.copies = GLOO_COPIES if graph.device == "cpu" else 0

    def _gather_parameters(self) -> None:
        readers: dict[str, set[int]] = {}
        for i, op in enumerate(self.given.ops):
            for name in op.inputs:
                readers.setdefault(name, set()).add(self.unit_of.get(i, -1))
        for value in self.given.values:
            if value.kind == "parameter":
                own = readers.get(value.name, set())
                k = own.pop() if len(own) == 1 else -1
                group = self.root if k < 0 else self.groups[k]
                group.gathered_bytes += self._padded_bytes(value)
                group.parameters_bytes += math.prod(value.shape) * element_bytes(value.dtype)

    def _sort_gradients(self) -> None:
        value_of = self.given.value_by_name
        for name in dict.fromkeys(self.given.outputs):
            value = value_of[name]
            if value.kind == "gradient":
                k = self.unit_of.get(self.given.op_index[value.producer], -1)
                (self.root if k < 0 else self.groups[k]).gradients.append(value)

    def _padded_bytes(self, value: Value) -> int:
        shard_bytes = self.sharding.shard_elements(value.shape) * element_bytes(value.dtype)
        return self.sharding.world_size * shard_bytes

    def graph(self) -> TrainingGraph:
        reduced = {v.name for group in (*self.groups, self.root) for v in group.gradients}
        ops = (*self._forward(), *self._backward())
        kept = tuple(name for name in self.given.outputs if name not in reduced)
        return msgspec.structs.replace(
            self.given,
            ops=ops,
            values=(*self.given.values, *self.values),
            outputs=(*kept, *self.shards),
            notes=(*self.given.notes, UNTIMED),
        )

    def _forward(self) -> Iterator[Op]:
        """A gathered buffer outlives its block until the next one has been gathered."""
        yield self._gather(self.root, "forward", "")
        yield self._unshard(self.root, "forward")
        buffer = "gathered_forward_"
        for i, op in enumerate(self.given.ops[: self.given.n_forward]):
            k = self.unit_of.get(i, -1)
            if k >= 0 and i == self.units[k].start:
                yield self._gather(self.groups[k], "forward", buffer)
                yield self._unshard(self.groups[k], "forward")
                buffer = f"gathered_forward_{self.groups[k].path}"
            yield op
            if k >= 0 and i == self.units[k].stop - 1:
                yield self._reshard(self.groups[k], "forward", ())
        yield self._op(RESHARD, "forward", "", (buffer,))

    def _backward(self) -> Iterator[Op]:
        """Each block's parameters are gathered when the backward before it begins."""
        reduced: tuple[str, ...] = ()
        yield self.given.ops[self.given.n_forward]
        if self.groups:
            yield self._gather(self.groups[-1], "backward", "", "")
        for i in range(self.given.n_forward + 1, len(self.given.ops)):
            k = self.unit_of.get(i, -1)
            if k >= 0 and i == self.units[k].back_start:
                yield self._unshard(self.groups[k], "backward")
                if k:
                    yield self._gather(self.groups[k - 1], "backward", "", self.groups[k].path)
            yield self.given.ops[i]
            if k >= 0 and i == self.units[k].back_stop - 1:
                yield self._reshard(self.groups[k], "backward", reduced)
                yield from self._reduce(self.groups[k])
                reduced = self._buffer_of(self.groups[k])
        yield self._op(RESHARD, "backward", "", ("unsharded_forward_", *reduced))
        yield from self._reduce(self.root)

    def _gather(self, group: _Group, phase: Phase, freed: str, module: str | None = None) -> Op:
        """Gather the parameters of `group` into one buffer.

        Parameters
        ----------
        freed : a buffer that is let go of then. module : where it runs; None for the group's.
        """
        name = f"gathered_{phase}_{group.path}"
        return self._op(
            GATHER, phase, group.path if module is None else module, (freed,) if freed else (),
            Value(name, group.gathered_bytes), self.copies * group.gathered_bytes, group.path,
        )  # fmt: skip

    def _unshard(self, group: _Group, phase: Phase) -> Op:
        """Copy from the buffer into the parameters."""
        name = f"unsharded_{phase}_{group.path}"
        buffer = (f"gathered_{phase}_{group.path}",)
        return self._op(UNSHARD, phase, group.path, buffer, Value(name, group.gathered_bytes))

    def _reshard(self, group: _Group, phase: Phase, freed: tuple[str, ...]) -> Op:
        read = (f"unsharded_{phase}_{group.path}", *freed)
        return self._op(RESHARD, phase, group.path, read)

    def _reduce(self, group: _Group) -> Iterator[Op]:
        """Gradients are copied into one buffer, then freed, then summed over the ranks."""
        if not group.gradients:
            return
        input_bytes = self._input_bytes(group)
        (buffer,), shards = self._buffer_of(group), f"gradient_shards_{group.path}"
        names = tuple(value.name for value in group.gradients)
        yield self._op(COPY_IN, "backward", group.path, names, Value(buffer, input_bytes))
        self.shards.append(shards)
        yield self._op(
            REDUCE, "backward", group.path, (buffer,),
            Value(shards, input_bytes // self.sharding.world_size, kind="gradient"),
            self.copies * input_bytes,
        )  # fmt: skip

    def _buffer_of(self, group: _Group) -> tuple[str, ...]:
        return (f"reduced_{group.path}",) if group.gradients else ()

    def _op(
        self,
        target: str,
        phase: Phase,
        module: str,
        inputs: tuple[str, ...],
        made: Value | None = None,
        workspace_bytes: int = 0,
        path: str | None = None,
    ) -> Op:
        """An op of its own name, and the value it makes."""
        place = module if path is None else path
        name = f"{target.removeprefix('remat.')}_{phase}_{place}"
        if made is not None:
            self.values.append(msgspec.structs.replace(made, producer=name))
        return Op(
            name, target, phase, inputs, () if made is None else (made.name,),
            workspace_bytes=workspace_bytes, module=module, price="estimated",
            pinned="all ranks take part in it",
        )  # fmt: skip

    def _input_bytes(self, group: _Group) -> int:
        """Bytes of the buffer that gradients are reduced in.

        It is padded as parameters are, if each of them has a gradient.
        """
        size_bytes = sum(value.size_bytes for value in group.gradients)
        if size_bytes == group.parameters_bytes:
            return group.gathered_bytes
        return -(-size_bytes // self.sharding.world_size) * self.sharding.world_size


def on_one_rank(graph: TrainingGraph, sharding: Sharding) -> TrainingGraph:
    """The step of one rank, with blocks found by the module paths of ops.

    Raises
    ------
    CaptureError : the glob of blocks matches no module, or they cannot run as units.
    """
    if sharding.kind == "ddp":
        return msgspec.structs.replace(graph, notes=(*graph.notes, UNTIMED))
    if sharding.kind == "none":
        return graph
    if not sharding.blocks:
        return sharded(graph, (), sharding)
    return sharded(*with_units(graph, ops_by_block(graph, sharding.blocks)), sharding)
