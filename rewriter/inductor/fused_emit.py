"""Schedule → the forward and backward graphs that Inductor compiles."""

from __future__ import annotations

import torch
from torch import fx

from remat.graph_capture.distributed.collectives import wait_nodes
from remat.graph_capture.graph import TANGENTS, Op
from remat.graph_capture.joint.nodes import is_getitem
from remat.graph_capture.torch_private.inductor import REALIZE
from remat.rewriter.graphs.emitter import Demand, Emitter, as_module, emit_both
from remat.rewriter.inductor.fused_graph import FusedJoint
from remat.rewriter.inductor.fused_nodes import is_generated, is_inlined, shares_storage
from remat.schedules.schedule import Compute, Free, Schedule

MOVED = frozenset({torch.ops.aten.mm.default})
"""Calls that Inductor makes one with an addition, at the place of the addition.

For tied weights, a product moved there would hold the logits' gradient to the end of backward.
"""


class _FusedEmitter(Emitter[FusedJoint]):
    """Emits one of the two graphs, each inlined node right before the kernel that reads it.

    `lasting` are the steps whose results are kept across a call.
    """

    cannot_move = "which cannot be compiled"

    def __init__(self, joint: FusedJoint, demand: Demand, lasting: set[int]) -> None:
        super().__init__(joint, demand)
        self.lasting = lasting
        self.in_kernels: dict[fx.Node, fx.Node] = {}
        self.inlined: list[fx.Node] = []

    def put(self, node: fx.Node, copy: fx.Node, stored: fx.Node | None = None) -> None:
        super().put(node, copy)
        self.in_kernels[node] = stored or copy

    def forget(self, node: fx.Node) -> None:
        super().forget(node)
        self.in_kernels.pop(node, None)

    def values_behind(self, node: fx.Node) -> tuple[str, ...]:
        # Of inlined nodes too: a copy that outlived one of these would keep it alive in Inductor.
        return self.joint.values_read.get(node, ())

    def resolve(self, node: fx.Node, in_kernel: bool = False) -> fx.Node:
        copies = self.in_kernels if in_kernel else self.copies
        if node not in copies:
            entered = self.entering(node)
            if entered is not None:
                self.put(node, entered)
            elif shares_storage(node):
                copies[node] = self._copy(node, in_kernel)
                self.note_copied(node)
                self.inlined.append(node)
            else:
                self.put(node, self._copy(node, in_kernel=True))
                self.inlined.append(node)
        return copies[node]

    def compute(self, op: Op) -> None:
        if op.target == TANGENTS:
            return
        node = self.joint.node_of_op[op.name]
        copy = self._copy(node, in_kernel=is_generated(node))
        if not is_generated(node):
            # Inductor would store what kernels on both sides of a call read.
            for inlined in self.inlined:
                self.forget(inlined)
            self.inlined.clear()
        if isinstance(node.meta.get("val"), (tuple, list)):
            self._pick(node, copy)
        else:
            self.put(node, copy, self._stored(node, copy) if self.at in self.lasting else None)
            self._wait(node)

    def _pick(self, node: fx.Node, copy: fx.Node) -> None:
        for part in node.users:
            if is_getitem(part) and part not in self.copies:
                picked = self.graph.call_function(part.target, (copy, part.args[1]))  # pyright: ignore
                picked.meta = dict(part.meta)
                self.put(part, picked)
                self._wait(part)

    def _wait(self, made: fx.Node) -> None:
        # A collective's result is what was waited for, as in `EagerEmitter`.
        for wait in wait_nodes(made):
            self.put(wait, self._copy(wait, in_kernel=False))

    def _copy(self, node: fx.Node, in_kernel: bool) -> fx.Node:
        return self.copy_of(node, node.name, lambda read: self.resolve(read, in_kernel))

    def _stored(self, node: fx.Node, copy: fx.Node) -> fx.Node | None:
        # Only what kernels could compute themselves, or what moves, need be stored.
        if not is_inlined(node) and node.target not in MOVED:
            return None
        # Kernels read it through this, so that Inductor stores it where it is made.
        stored = self.graph.call_function(REALIZE, (copy,))
        stored.meta = dict(node.meta)
        return stored


def emit_fused(joint: FusedJoint, schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graphs that carry out `schedule`, in AOTAutograd's contract."""
    schedule.check_made_for(joint.graph)
    lasting = _lasting_steps(joint, schedule)

    def start(demand: Demand, left_live: frozenset[str]) -> _FusedEmitter:
        return _FusedEmitter(joint, demand, lasting)

    forward, backward = emit_both(joint, schedule, joint.n_outputs, start)
    return as_module(joint, forward), as_module(joint, backward)


def _lasting_steps(joint: FusedJoint, schedule: Schedule) -> set[int]:
    calls = {name for name, node in joint.node_of_op.items() if not is_generated(node)}
    ops, index = joint.graph.ops, joint.graph.op_index
    made_at: dict[str, int] = {}
    lasting: set[int] = set()
    for i, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            made_at.pop(step.value, None)
        elif isinstance(step, Compute):
            op = ops[index[step.op]]
            if op.name in calls:
                # Live while a later call runs.
                lasting.update(made_at.values())
            made_at.update({value: i for value in op.outputs if value not in made_at})
    return lasting
