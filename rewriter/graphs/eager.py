"""Emits the steps of a schedule as eager's ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.distributed.collectives import skip_wait, wait_nodes, waits_late
from remat.graph_capture.graph import ACCUMULATE, TANGENTS, UPDATE, Op
from remat.graph_capture.joint.build import SAVE_RNG, STATISTICS, Joint
from remat.graph_capture.joint.exact_ops import RECOMPUTED_BY
from remat.graph_capture.joint.in_place_ops import STEP_METAS, JoinedOp, JoinedTarget
from remat.graph_capture.joint.nodes import (
    aten,
    drawn_on,
    draws_randomness,
    is_alias_of_input,
    is_getitem,
    is_tangent,
    tensors_of,
)
from remat.graph_capture.torch_private.aot import (
    MemoryFormatMeta,
    PlainTensorMeta,
    ViewAndMutationMeta,
)
from remat.graph_capture.torch_private.core import suggest_memory_format
from remat.rewriter.graphs.codegen import release_gradients
from remat.rewriter.graphs.emitter import Demand, Demanded, Emitter
from remat.rewriter.graphs.rng import draw_noting, run_with_rng_state, save_rng_state

RNG_STATE = "rng_state_"


class EagerEmitter(Emitter[Joint]):
    """Emits one of the two graphs in eager's ops; `again` have run before, `repeated` run again."""

    cannot_move = "and has nowhere to copy to"

    def __init__(
        self, joint: Joint, demand: Demand, again: set[str], repeated: set[str],
        left_live: frozenset[str], writes: bool,
    ) -> None:  # fmt: skip
        super().__init__(joint, demand)
        self.writes, self.again, self.repeated = writes, again, repeated
        self.left_live = set(left_live)
        self.tuples: dict[fx.Node, fx.Node] = {}
        self.states: dict[str, fx.Node] = {}
        self.updates: dict[str, tuple[fx.Node, fx.Node]] = {}
        self.released: dict[int, fx.Node] = {}
        self.under_way: dict[fx.Node, None] = {}  # collectives that nothing waits for yet

    def values_behind(self, node: fx.Node) -> tuple[str, ...]:
        value = self.joint.value_of_node.get(node)
        return () if value is None else (value,)

    def free(self, value: str) -> None:
        self.left_live.discard(value)
        self.states.pop(value, None)
        for made in tuple(self.under_way):
            if value in self.values_behind(made):  # or it would write to memory of others
                self._end(made)
        super().free(value)

    def kept(self, what: Demanded) -> fx.Node:
        if isinstance(what, str):
            return self.states[what]
        assert isinstance(what, fx.Node)
        return super().kept(self.joint.in_place.last(what))  # as it is after the last write

    def results(self, results: Iterable[Any]) -> list[Any]:
        found = super().results(results)
        for made in tuple(self.under_way):
            self._end(made)
        return found

    def resolve(self, node: fx.Node) -> fx.Node:
        if self.under_way:
            self._end(skip_wait(node))
        if node in self.copies:
            return self.copies[node]
        if is_alias_of_input(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            copy = self.resolve(source)
        elif node in self.joint.in_place.before:  # in backward, which has it as it is in the end
            copy = self.resolve(self.joint.in_place.before[node])
        else:
            copy = self.entering(node) or self._copy(node, node.name)
        self.put(node, copy)
        return copy

    def _copy(self, node: fx.Node, name: str) -> fx.Node:
        if isinstance(node.target, JoinedTarget):
            return self._steps(node, node.target, name)
        return self.copy_of(node, name, self.resolve)

    def _steps(self, node: fx.Node, target: JoinedTarget, name: str) -> fx.Node:
        def run(i: int, step: JoinedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
            if self.writes and step.is_whole:  # the first argument was written to already
                return args[0]
            called = (self.writes and step.in_place) or step.op
            own = name if i == last else f"{name}_step_{i}"
            return self.call(called, args, kwargs, own, node.meta[STEP_METAS][i])

        last = len(target.steps) - 1
        calls, _ = self.arguments(node, self.resolve)
        return target.carried_out(calls, run)

    def compute(self, op: Op) -> None:
        again = op.name in self.again
        self.again.add(op.name)
        if op.target == TANGENTS:  # tangents come from autograd: nothing runs
            return
        if op.target in (ACCUMULATE, UPDATE):
            self._release_gradients(op)
        elif op.target == SAVE_RNG:
            self._save_rng_state(op)
        elif op.target == STATISTICS:
            for name in op.outputs:
                if name in self.updates:
                    self.put(*self.updates.pop(name))
        else:
            self._run(op, self.joint.node_of_op[op.name], again)

    def gradients(self, results: Sequence[Any]) -> list[Any]:
        # What was released may not be live any more.
        rest = {i: r for i, r in enumerate(results) if i not in self.released}
        found = dict(zip(rest, self.results(rest.values()), strict=True)) | self.released
        return [found[i] for i in range(len(results))]

    def _release_gradients(self, op: Op) -> None:
        places = self.joint.accumulations[op.name]
        results: Any = self.joint.module.graph.output_node().args[0]
        own = results[self.joint.num_forward_outputs :]
        self.released |= {place: self.resolve(own[place]) for place in places}
        if self.writes or op.target == UPDATE:  # else code by Inductor would be cut at each
            given = tuple(self.released[place] for place in places)
            self.graph.call_function(release_gradients, (places, given))

    def _save_rng_state(self, op: Op) -> None:
        if self.is_saved_state(op.name):  # no op that runs once draws again
            device = str(drawn_on(self.joint.node_of_op[op.name.removeprefix(RNG_STATE)]))
            meta = {"val": self.fake_state(op.name)}
            self.states[op.outputs[0]] = self.call(save_rng_state, (device,), {}, op.name, meta)

    def is_saved_state(self, value: str) -> bool:
        return value.startswith(RNG_STATE) and value.removeprefix(RNG_STATE) in self.repeated

    def fake_state(self, value: str) -> Tensor:
        node = self.joint.node_of_op[value.removeprefix(RNG_STATE)]
        drawn: Any = next(tensor for tensor in tensors_of(node) if tensor is not None)
        with drawn.fake_mode:  # AOTAutograd wants what a step saves described
            return torch.empty(save_rng_state(str(drawn_on(node))).shape, dtype=torch.uint8)

    def _run(self, op: Op, node: fx.Node, again: bool) -> None:
        if again and draws_randomness(node):
            # It leaves the stream as eager's one draw does.
            copy = self._draw(op, node, run_with_rng_state, f"{node.name}_again")
        elif self.writes and f"{RNG_STATE}{op.name}" in self.states:
            copy = self._draw(op, node, draw_noting, node.name)  # this first draw makes a note
        elif again and node.target in RECOMPUTED_BY:
            copy = self._normalise_again(node)
        else:
            copy = self._copy(node, f"{node.name}_again" if again else node.name)
        if node in self.joint.in_place.targets:
            self._write(node, copy)
        elif isinstance(node.meta.get("val"), (tuple, list)):
            self.tuples[node] = copy
            for picked, result in self._picked_results(node, op):
                self.put(picked, result)
                self._wait(picked)
            # The next run has none, and their update may come late: the tuple would hold the rest.
            index = self.joint.graph.op_index.get(f"{op.name}_statistics")
            if not again and index is not None:
                for picked, copy in self._picked_results(node, self.joint.graph.ops[index]):
                    self.updates[self.joint.value_of_node[picked]] = picked, copy
        else:
            self.put(node, copy)
            self._wait(node)
            first = self.joint.in_place.begins.get(node, node)
            if first is not node:  # a view, which stands for the value from now on
                self.put(first, self._copy(first, first.name))

    def _write(self, node: fx.Node, copy: fx.Node) -> None:
        writes = self.joint.in_place
        if self.writes:
            copy.target = writes.targets[node]
        self.put(node, copy)
        for whole in writes.scattered[node]:
            if not self.writes:
                self.put(whole, self._copy(whole, whole.name))
            elif whole in writes.before:
                self.put(whole, self.resolve(writes.before[whole]))

    def _wait(self, made: fx.Node) -> None:
        self.under_way[made] = None
        if not waits_late(made):
            self._end(made)

    def _end(self, made: fx.Node) -> None:
        if made not in self.under_way:
            return
        del self.under_way[made]
        for wait in wait_nodes(made):  # a collective's result is what was waited for
            self.put(wait, self._copy(wait, wait.name))

    def _draw(self, op: Op, node: fx.Node, drawing: Any, name: str) -> fx.Node:
        saved = f"{RNG_STATE}{op.name}"
        if (state := self.states.get(saved)) is None:
            state = self.states[saved] = self.bring(saved)
        args, kwargs = self.arguments(node, self.resolve)
        taken: tuple[Any, ...] = (state, str(drawn_on(node)), node.target, *args)
        return self.call(drawing, taken, kwargs, name, node.meta)

    def _normalise_again(self, node: fx.Node) -> fx.Node:
        read = [self.resolve(a) if isinstance(a, fx.Node) else a for a in node.args[:3]]
        target, n_results = RECOMPUTED_BY[node.target]
        taken: tuple[Any, ...] = (*read, *node.args[5:])  # arguments 3 and 4 are already updated
        meta = {**node.meta, "val": node.meta["val"][:n_results]}
        return self.call(target, taken, {}, f"{node.name}_again", meta)

    def _picked_results(self, node: fx.Node, op: Op) -> Iterator[tuple[fx.Node, fx.Node]]:
        for name in op.outputs:
            base = self.joint.base_of_value.get(name)
            picked = base and skip_wait(base)
            if picked is None or not is_getitem(picked):
                continue
            if name in self.left_live or picked in self.copies:  # a second run's goes unread
                continue
            args = self.tuples[node], picked.args[1]
            yield picked, self.call(picked.target, args, {}, picked.name, picked.meta)


# Backward takes gradients in the strides that they come in, as eager does: ``out.sum()`` sends back
# an expanded number. AOTAutograd would copy into traced strides, and a kernel that sums, as batch
# norm's does, adds a copy's elements in another order.

RESHAPES = (aten.view.default, aten._unsafe_view.default)
_OWN_STRIDES = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
"""Their results have the same strides whatever those of their arguments are."""
_READ_MEMORY = (  # they read memory as the trace saw it laid out
    aten.as_strided.default, aten.as_strided_scatter.default, aten._reshape_alias.default,
    aten.view.dtype,
)  # fmt: skip
_COPIED: dict[Any, tuple[int, int | None]] = {
    aten.native_group_norm_backward.default: (0, 1),
    aten.cudnn_batch_norm_backward.default: (1, 0),
    aten._cdist_backward.default: (0, None),
    aten._weight_norm_interface_backward.default: (0, None),
    aten.view_as_complex.default: (0, None),
    aten.view_as_real.default: (0, None),
}
# Autograd's ``contiguous`` on a gradient, which no contiguous trace shows (``derivatives.yaml``):
# the gradient's argument, and that of the input whose memory format is asked for.


def take_as_they_come(metadata: ViewAndMutationMeta, backward: fx.Graph) -> None:
    reached = _reached(backward)
    if any(node.target in _READ_MEMORY for node in reached):
        return
    for node in reached:
        if node.target in RESHAPES:
            node.target = aten.reshape.default  # a reshape copies what no view shows, as in eager
        elif node.target in _COPIED:
            _make_contiguous(node, *_COPIED[node.target])
    anything: Any = _Anything()
    for fact in metadata.subclass_tangent_meta or ():
        if isinstance(fact, PlainTensorMeta):
            # AOTAutograd copies a gradient whose strides differ from these: let them equal all.
            fact.memory_format = MemoryFormatMeta(size=anything, stride=anything)


def _reached(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose strides may depend on those of a gradient of more than one element."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            # One element is laid out in one way.
            if is_tangent(node) and any(t is not None and t.numel() > 1 for t in tensors_of(node)):
                reached.add(node)
        elif node.target not in _OWN_STRIDES and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def _make_contiguous(node: fx.Node, gradient: int, like: int | None) -> None:
    read = node.args[gradient]
    assert isinstance(read, fx.Node)
    layout = torch.contiguous_format
    is_group_norm = node.target is aten.native_group_norm_backward.default
    on_cpu = is_group_norm and node.args[0].meta["val"].device.type == "cpu"  # pyright: ignore
    if like is not None and (on_cpu or not is_group_norm):  # group norm's is asked on a CPU
        source = node.args[like]
        assert isinstance(source, fx.Node)
        layout = suggest_memory_format(source.meta["val"])
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.contiguous.default, (read,), {"memory_format": layout})
    copy.meta = dict(read.meta)
    node.update_arg(gradient, copy)


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # pyright: ignore[reportAssignmentType]
