"""One rank's step, with what DDP or FSDP2 adds to it; communication's time is not predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from msgspec.structs import replace

from remat.graph_capture.distributed.sharding import (
    COPY_IN,
    GATHER,
    REDUCE,
    RESHARD,
    STEP_AT_ONCE,
    UNSHARD,
    UNTIMED,
    ParameterGroup,
    Sharding,
    Unit,
    element_bytes,
    ops_by_block,
    unit_of_op,
    with_units,
    wrapped_groups,
)
from remat.graph_capture.graph import Op, Phase, TrainingGraph, Value
from remat.graph_capture.sizes.ranged_graph import RangedGraph

# When a wrapper communicates is fixed, so each communication is an op, pinned where it stands, and
# its buffer a value, read by the op that lets go of it. As workspaces of ops beside them, buffers
# were wrong wherever an op of forward runs again.

# Right before and after.
BEFORE_BLOCK, BEHIND_BLOCK = (GATHER, UNSHARD), (RESHARD, COPY_IN, REDUCE, STEP_AT_ONCE)
COMMUNICATION = (*BEFORE_BLOCK, *BEHIND_BLOCK)

_STEP_TENSORS = 2  # of a parameter's size, that a step of Adam makes at once
_GLOO_COPIES = 1  # of a whole buffer that gloo, of CPUs, makes while it gathers or reduces


def _communication_op(
    target: str, phase: Phase, module: str, inputs: tuple[str, ...], made: tuple[Value, ...] = (),
    workspace_bytes: int = 0, place: str | None = None,
) -> tuple[Op, tuple[Value, ...]]:  # fmt: skip
    """With the values that it makes. `place`: what it is for, which names it; None: `module`."""
    name = f"{target.removeprefix('remat.')}_{phase}_{module if place is None else place}"
    values = tuple(replace(value, producer=name) for value in made)
    op = Op(
        name, target, phase, inputs, tuple(value.name for value in values),
        workspace_bytes=workspace_bytes, module=module, cost_origin="estimated",
        no_recompute="all ranks take part in it",
    )  # fmt: skip
    return op, values


# DDP with ``gradient_as_bucket_view=True`` copies each gradient into its bucket at once and frees
# it. Buckets are resident. Source: `torch.nn.parallel.DistributedDataParallel` of torch 2.13, read
# and measured. Li et al., PyTorch Distributed, 2020, https://arxiv.org/abs/2006.15704.


def _with_copies(
    graph: TrainingGraph, nodes: Sequence[Unit], gradients: set[str], target: str = COPY_IN
) -> Iterator[Op]:
    node_of = unit_of_op(nodes)
    made: list[str] = []
    size = {name: graph.value_by_name[name].size_bytes for name in gradients}
    for i, op in enumerate(graph.ops):
        yield op
        made.extend(name for name in op.outputs if name in gradients)
        node = nodes[node_of[i]] if i in node_of else None
        if made and (node is None or i == node.back_stop - 1):  # a node holds them until it ends
            module, place = (node.path, node.path) if node else ("", op.name)
            most_bytes = max(size[name] for name in made) * _STEP_TENSORS * (target == STEP_AT_ONCE)
            yield _communication_op(
                target, "backward", module, tuple(made), workspace_bytes=most_bytes, place=place
            )[0]
            made = []


# FSDP2's buffers over the ops of a step, and those of its `replicate`. Parameters are gathered
# right before a module's forward and backward, gradients reduced right after. With a mixed
# precision policy shards are cast, then gathered; gradients go through a buffer of the reduced
# dtype. Source: `torch.distributed.fsdp._fully_shard` of torch 2.13, read and measured.
#
# Not counted: custom collectives, shards along other dimensions than the first, gradients that are
# accumulated in another dtype. With the loss outside the model, the last buffer is freed earlier.

_Kept = Literal["whole", "part", "none"]  # left of gathered parameters; part: over fewer ranks


def beside_communication(ops: Sequence[Op]) -> dict[str, str]:
    """Chunks that precede an op stand before what is gathered for it, and before what follows the
    whole model's forward or backward: else they would run without buffers that are still there."""
    places, first = dict[str, str](), ""
    for op in ops:
        is_after = op.target in BEHIND_BLOCK and not op.module
        if is_after or (op.target in BEFORE_BLOCK and op.module):
            first = first or op.name
        elif first:
            places[op.name], first = first, ""
    return {**places, "": first}


class _FsdpStep:
    def __init__(
        self, graph: TrainingGraph, units: Sequence[Unit], sharding: Sharding, *, is_updated: bool
    ) -> None:
        self.is_updated = is_updated
        self.given, self.units, self.sharding = graph, units, sharding
        self.unit_of = unit_of_op(units)
        self.groups, self.root = wrapped_groups(graph, units, sharding)
        self.values: list[Value] = []
        self.lasting: list[str] = []
        self.let_go_bytes = 0  # of whole gradients, less the shards made of them
        self.copies = _GLOO_COPIES if graph.device == "cpu" else 0
        self.is_copy = sharding.kind == "replicate"
        self.is_offloaded = sharding.cpu_offload and graph.device != "cpu"

    def graph(self) -> TrainingGraph:
        """The step of one rank: gradients leave it as shards."""
        reduced = {v.name for group in (*self.groups, self.root) for v in group.gradients}
        ops = (*self._forward(), *self._backward())
        kept = tuple(name for name in self.given.outputs if name not in reduced)
        return replace(
            self.given, ops=ops, values=(*self.given.values, *self.values),
            outputs=(*kept, *self.lasting), notes=(*self.given.notes, UNTIMED),
        )  # fmt: skip

    def _kept(self, group: ParameterGroup) -> _Kept:
        """What `reshard_after_forward` leaves of a group; by default the root stays whole."""
        how = self.sharding.reshard_after_forward
        if self.is_copy or how is False or (how is None and group is self.root):
            return "whole"
        return "none" if how in (None, True, self.sharding.shard_ranks) else "part"

    def _forward(self) -> Iterator[Op]:
        yield from self._whole(self.root, "")
        last = self.root
        for i, op in enumerate(self.given.ops[: self.given.n_forward]):
            k = self.unit_of.get(i, -1)
            if k >= 0 and i == self.units[k].start:
                # A gathered buffer outlives its block until the next one has been gathered.
                yield from self._whole(self.groups[k], f"gathered_forward_{last.path}")
                last = self.groups[k]
            yield op
            if k >= 0 and i == self.units[k].stop - 1:
                yield from self._after_forward(self.groups[k], "")
        yield from self._after_forward(self.root, f"gathered_forward_{last.path}")

    def _whole(self, group: ParameterGroup, freed: str) -> Iterator[Op]:
        """Parameters of `group` for its forward; `freed` is a buffer that is let go of then."""
        if self.is_copy:
            made = Value(f"unsharded_forward_{group.path}", group.parameters_bytes)
            yield self._op(UNSHARD, "forward", group.path, (), made)
            return
        yield self._gather(group, "forward", freed)
        yield self._unshard(group, "forward")

    def _after_forward(self, group: ParameterGroup, buffer: str) -> Iterator[Op]:
        """What is left of a group's parameters; with the root's, the last buffer goes."""
        kept = self._kept(group)
        freed = () if kept == "whole" else (f"unsharded_forward_{group.path}",)
        if buffer and not self.is_copy:
            freed = (*freed, buffer)
        part = [Value(f"part_{group.path}", group.gathered_bytes // self._members)]
        if freed:
            yield self._op(RESHARD, "forward", group.path, freed, *(part if kept == "part" else ()))

    def _backward(self) -> Iterator[Op]:
        reduced: tuple[str, ...] = ()
        yield self.given.ops[self.given.n_forward]
        if self._kept(self.root) != "whole":
            yield from (self._gather(self.root, "backward"), self._unshard(self.root, "backward"))
        is_gathered_again = any(self._kept(group) != "whole" for group in self.groups)
        if is_gathered_again:
            yield self._gather(self.groups[-1], "backward", module="")
        for i in range(self.given.n_forward + 1, len(self.given.ops)):
            k = self.unit_of.get(i, -1)
            if is_gathered_again and k >= 0 and i == self.units[k].back_start:
                yield self._unshard(self.groups[k], "backward")
                if k:  # the next is gathered as this one's backward begins
                    yield self._gather(self.groups[k - 1], "backward", module=self.groups[k].path)
            yield self.given.ops[i]
            if k >= 0 and i == self.units[k].back_stop - 1:
                yield from self._after_backward(self.groups[k], reduced)
                reduced = self._buffer_of(self.groups[k])
        yield from self._after_backward(self.root, reduced)

    def _after_backward(self, group: ParameterGroup, reduced: tuple[str, ...]) -> Iterator[Op]:
        phase = "forward" if self._kept(group) == "whole" else "backward"
        freed = (f"unsharded_{phase}_{group.path}", *reduced)
        # Parameters go back to shards, and the last buffer goes, before this one's is made.
        # It reads the gradients, as none can be made again from parameters that are gone.
        names = tuple(value.name for value in group.gradients)  # one buffer, then a sum over ranks
        yield self._op(RESHARD, "backward", group.path, (*freed, *names))
        if not names:
            return
        input_bytes, held_bytes = group.reduced_bytes(self.sharding)
        made, beside_bytes = self._reduced(group, input_bytes, held_bytes)
        if not self.sharding.gradient_sync:
            most_bytes = input_bytes + beside_bytes + sum(value.size_bytes for value in made)
            yield from self._added_to_whole(group, input_bytes, most_bytes)
            return
        (buffer,) = self._buffer_of(group)
        yield self._op(COPY_IN, "backward", group.path, names, Value(buffer, input_bytes))
        # A loop of torch's `foreach_reduce` ends with a name for the last gradient, which holds it.
        held = names[-1:] if self.sharding.shard_ranks > 1 else ()
        into_shards = self._op(
            REDUCE, "backward", group.path, (buffer, *held), *made,
            workspace_bytes=beside_bytes,
        )  # fmt: skip
        yield into_shards
        if self.is_updated:
            made = into_shards.outputs
            workspace_bytes = self._update_bytes(group)
            yield self._op(
                STEP_AT_ONCE, "backward", group.path, made, workspace_bytes=workspace_bytes
            )
        else:
            self.lasting.extend(into_shards.outputs)

    def _update_bytes(self, group: ParameterGroup) -> int:
        most = max(self.sharding.shard_elements(v.shape) for v in group.gradients)
        return most * _STEP_TENSORS * element_bytes(group.gradients[0].dtype)

    def _reduced(
        self, group: ParameterGroup, input_bytes: int, held_bytes: int
    ) -> tuple[tuple[Value, ...], int]:
        """What the sum over ranks makes, and the bytes beside it and its input."""
        part_bytes = input_bytes // self.sharding.shard_ranks
        copies_bytes = self.copies * input_bytes if self.sharding.shard_ranks > 1 else 0
        is_cast = part_bytes != held_bytes
        shards = Value(f"gradient_shards_{group.path}", held_bytes, kind="gradient")
        made, beside_bytes = (shards,), copies_bytes
        # Where replicas sum the part again in another dtype, torch keeps it until backward ends.
        if is_cast and (self.sharding.replicas > 1 or self.is_copy):
            made = (shards, Value(f"reduced_part_{group.path}", part_bytes))
            beside_bytes = max(copies_bytes - held_bytes, 0)
        elif is_cast:
            beside_bytes = max(copies_bytes + part_bytes - held_bytes, part_bytes)
        if self.is_offloaded:  # the shards of gradients go to the host
            made, beside_bytes = made[1:], beside_bytes + held_bytes
        return made, beside_bytes

    # Whole gradients are resident where batches are summed before they are reduced: a batch
    # between has all of them at each op. The last one lets go of them group by group; what it
    # makes in their place counts where it takes more.

    def _added_to_whole(
        self, group: ParameterGroup, input_bytes: int, most_bytes: int
    ) -> Iterator[Op]:
        """`most_bytes`: of the reduction, with its input and what it makes."""
        size_bytes = sum(value.size_bytes for value in group.gradients)
        copy_bytes = input_bytes - self.let_go_bytes - size_bytes
        names = tuple(value.name for value in group.gradients)
        yield self._op(COPY_IN, "backward", group.path, names, workspace_bytes=max(copy_bytes, 0))
        shards_bytes = group.reduced_bytes(self.sharding)[1]
        if self.is_updated:
            most_bytes = max(most_bytes, shards_bytes + self._update_bytes(group))
            shards_bytes = 0
        own = (math.prod(v.shape) * self.sharding.summed_bytes(v.dtype) for v in group.gradients)
        self.let_go_bytes += sum(own)
        reduce_bytes = max(most_bytes - self.let_go_bytes, 0)
        yield self._op(REDUCE, "backward", group.path, (), workspace_bytes=reduce_bytes)
        self.let_go_bytes -= shards_bytes

    def _gather(
        self, group: ParameterGroup, phase: Phase, freed: str = "", module: str | None = None
    ) -> Op:
        """`freed`: a buffer that is let go of then; `module`: where it runs, if not the group's."""
        is_alone = self.sharding.shard_ranks == 1  # torch copies into the parameters, at once
        gathered_bytes = 0 if is_alone else group.gathered_bytes
        beside_bytes = self.copies * gathered_bytes
        if self.sharding.param_dtype:  # what is sent is cast first
            is_part = phase == "backward" and self._kept(group) == "part"
            members = self._members if is_part else self.sharding.shard_ranks
            beside_bytes += group.gathered_bytes // members
        if self.is_offloaded:  # the shard comes from the host first
            beside_bytes += group.shard_bytes
        return self._op(
            GATHER, phase, group.path if module is None else module, (freed,) if freed else (),
            Value(f"gathered_{phase}_{group.path}", gathered_bytes),
            workspace_bytes=beside_bytes, place=group.path,
        )  # fmt: skip

    @property
    def _members(self) -> int:
        """Ranks over which parameters are sharded between forward and backward, by a number."""
        return int(self.sharding.reshard_after_forward or 1)

    def _unshard(self, group: ParameterGroup, phase: Phase) -> Op:
        """Copy from the buffer into the parameters; a part kept since forward is let go of."""
        read = (f"gathered_{phase}_{group.path}",)
        if phase == "backward" and self._kept(group) == "part":
            read = (*read, f"part_{group.path}")
        made = Value(f"unsharded_{phase}_{group.path}", group.gathered_bytes)
        return self._op(UNSHARD, phase, group.path, read, made)

    def _buffer_of(self, group: ParameterGroup) -> tuple[str, ...]:
        has_one = group.gradients and self.sharding.gradient_sync
        return (f"reduced_{group.path}",) if has_one else ()

    def _op(
        self, target: str, phase: Phase, module: str, inputs: tuple[str, ...], *made: Value,
        workspace_bytes: int = 0, place: str | None = None,
    ) -> Op:  # fmt: skip
        op, values = _communication_op(target, phase, module, inputs, made, workspace_bytes, place)
        self.values.extend(values)
        return op


def sharded(
    graph: TrainingGraph, units: Sequence[Unit], sharding: Sharding, *, is_eager: bool = False,
    is_updated: bool = False,
) -> TrainingGraph:  # fmt: skip
    """`graph` on one rank, with each unit wrapped by itself, then the model. `resident` is counted
    already. `is_eager`: units run op by op, and each gradient leaves backward on its own.
    `is_updated`: parameters are updated in backward, once their gradients are whole."""
    if sharding.kind in ("fsdp2", "replicate"):
        return _FsdpStep(graph, units, sharding, is_updated=is_updated).graph()
    if not (sharding.bucket_views or is_updated):
        return graph
    returned = [graph.value_by_name[name] for name in graph.outputs]
    gradients = {one.name for one in returned if one.kind == "gradient" and one.producer}
    nodes = () if is_eager else units  # blocks of one autograd node each
    taken = STEP_AT_ONCE if is_updated else COPY_IN
    return replace(
        graph, ops=tuple(_with_copies(graph, nodes, gradients, taken)),
        outputs=tuple(name for name in graph.outputs if name not in gradients),
        notes=graph.notes if is_updated else (*graph.notes, UNTIMED),
    )  # fmt: skip


def over_ranks(
    graph: RangedGraph, sharding: Sharding, *, is_rewritten: bool = False
) -> RangedGraph:
    """As `local_step`, at each size of a range."""
    if sharding.kind == "none":
        return graph
    return graph.changed(partial(local_step, sharding=sharding, is_rewritten=is_rewritten))


def local_step(
    graph: TrainingGraph, sharding: Sharding, *, is_rewritten: bool = False
) -> TrainingGraph:
    """The step of one rank; blocks are found by the module paths of ops. `is_rewritten`: the whole
    step is to be one autograd node, whose gradients come at its end."""
    if sharding.kind == "none":
        return graph
    # One node hands over all gradients at its end: buckets stand beside them, views or not.
    if sharding.has_buckets and (is_rewritten or not sharding.bucket_views):
        return replace(graph, notes=(*graph.notes, UNTIMED))
    if not sharding.blocks:
        return sharded(graph, (), sharding)
    found = with_units(graph, ops_by_block(graph, sharding.blocks))
    return sharded(*found, sharding, is_eager=True)
