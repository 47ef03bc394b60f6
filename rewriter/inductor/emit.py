"""Schedule → the forward and backward graphs that Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._inductor import test_operators

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import TANGENTS
from remat.graph_capture.joint.nodes import is_getitem, is_tangent
from remat.rewriter.graphs.emit import placeholder_like, require_end_of_forward
from remat.rewriter.inductor.graph import FusedJoint
from remat.rewriter.inductor.nodes import is_generated, is_inlined, is_view
from remat.schedules.schedule import Compute, Free, Schedule, Step

Demand = Callable[[fx.Node], fx.Node]

REALIZE = torch.ops._inductor_test.realize.default
"""Inductor's own way to have a result stored; what it returns is not copied in kernels."""
MOVED = frozenset({torch.ops.aten.mm.default})
"""Calls that Inductor makes one with an addition, at the place of the addition."""
assert test_operators, "it registers the op"


class FusedEmitter:
    """Emits one of the two graphs, each inlined node right before the kernel that reads it.

    A copy stands for its node as long as all values that it reads are live: after that, it
    would keep the dropped one alive inside Inductor. Nor does it outlive the next call: Inductor
    would store what kernels on both sides of it read. What is kept across calls is read by
    kernels through `realize`, so that Inductor stores it there, and does not keep what it is
    made of to make it again in each reader; a matrix product among them would else be moved
    to where it is added. Calls read stored tensors as they are.
    """

    def __init__(self, joint: FusedJoint, demand: Demand) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.demand = demand
        self.copies: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.copied: dict[str, list[fx.Node]] = {}
        self.inlined: list[fx.Node] = []
        self.bases = {node: name for name, node in joint.base_of_value.items()}

    def put(self, node: fx.Node, copy: fx.Node, stored: fx.Node | None = None) -> None:
        """Let `copy` stand for `node`, and in kernels `stored`, where it is another."""
        self.copies[node, False], self.copies[node, True] = copy, stored or copy
        for value in self.joint.values_read.get(node, ()):
            self.copied.setdefault(value, []).append(node)

    def step(self, step: Step, lasts: bool) -> None:
        """Emit one step of the schedule; `lasts` is whether its result is kept across calls."""
        if isinstance(step, Compute):
            op = self.joint.graph.ops[self.joint.graph.op_index[step.op]]
            if op.target != TANGENTS:
                self._compute(self.joint.node_of_op[op.name], lasts)
        elif isinstance(step, Free):
            self._forget(self.copied.pop(step.value, ()))
        else:
            raise RewriteError(
                f"the schedule moves {step.value} to the host, which cannot be compiled: "
                "solve without offloading"
            )

    def resolve(self, node: fx.Node, in_kernel: bool = False) -> fx.Node:
        """The emitted node that stands for `node`, for a kernel that reads it or for a call."""
        if (node, in_kernel) in self.copies:
            return self.copies[node, in_kernel]
        if node.op == "get_attr":
            self.put(node, self.graph.node_copy(node))
        elif node.op == "placeholder" or node in self.bases:
            self.put(node, self.demand(node))
        elif node.name in self.joint.node_of_op:
            raise RewriteError(f"the schedule reads {node.name} where it is not live")
        elif is_view(node):
            self._put_view(node, in_kernel)
        else:
            self.put(node, self._copy(node, in_kernel=True))
            self.inlined.append(node)
        return self.copies[node, in_kernel]

    def results(self, results: list[Any]) -> list[Any]:
        """Emitted nodes of some of the joint graph's results."""
        return [self.resolve(r) if isinstance(r, fx.Node) else r for r in results]

    def _forget(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            for in_kernel in (False, True):
                self.copies.pop((node, in_kernel), None)

    def _put_view(self, node: fx.Node, in_kernel: bool) -> None:
        self.copies[node, in_kernel] = self._copy(node, in_kernel)
        self.inlined.append(node)
        for value in self.joint.values_read[node]:
            self.copied.setdefault(value, []).append(node)

    def _copy(self, node: fx.Node, in_kernel: bool) -> fx.Node:
        args, kwargs = pytree.tree_map(
            lambda leaf: self.resolve(leaf, in_kernel) if isinstance(leaf, fx.Node) else leaf,
            (tuple(node.args), dict(node.kwargs)),
        )
        copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta = dict(node.meta)
        return copy

    def _compute(self, node: fx.Node, lasts: bool) -> None:
        copy = self._copy(node, in_kernel=is_generated(node))
        if not is_generated(node):
            self._forget(self.inlined)
            self.inlined.clear()
        if not isinstance(node.meta.get("val"), (tuple, list)):
            self.put(node, copy, self._stored(node, copy) if lasts else None)
            return
        for part in node.users:
            if is_getitem(part) and (part, False) not in self.copies:
                picked = self.graph.call_function(part.target, (copy, part.args[1]))  # pyright: ignore
                picked.meta = dict(part.meta)
                self.put(part, picked)

    def _stored(self, node: fx.Node, copy: fx.Node) -> fx.Node | None:
        """What kernels read of a result that they could compute themselves, or that moves."""
        if not is_inlined(node) and node.target not in MOVED:
            return None
        stored = self.graph.call_function(REALIZE, (copy,))
        stored.meta = dict(node.meta)
        return stored


def emit_fused(joint: FusedJoint, schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graphs that carry out `schedule`, in AOTAutograd's contract.

    Raises
    ------
    ScheduleError : the schedule was made for another graph.
    """
    schedule.check_made_for(joint.graph)
    end = require_end_of_forward(joint.graph, schedule)
    forward = _forward(joint)
    lasting = _lasting(joint, schedule)
    for i, step in enumerate(schedule.steps[:end]):
        forward.step(step, i in lasting)
    given = forward.results(joint.results[: joint.n_outputs])
    saved: dict[fx.Node, fx.Node] = {}
    backward = _backward(joint, forward, saved)
    for i, step in enumerate(schedule.steps[end:], start=end):
        backward.step(step, i in lasting)
    gradients = backward.results(joint.results[joint.n_outputs :])
    kept = sorted(saved, key=_is_without_version)
    _bring_in(joint, backward, kept, saved)
    forward.graph.output((*given, *(forward.resolve(node) for node in kept)))
    backward.graph.output(tuple(gradients))
    return _module(joint, forward.graph), _module(joint, backward.graph)


def _lasting(joint: FusedJoint, schedule: Schedule) -> set[int]:
    """Steps whose results are live while a later call runs."""
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
                lasting.update(made_at.values())
            made_at.update({value: i for value in op.outputs if value not in made_at})
    return lasting


def _is_without_version(node: fx.Node) -> bool:
    """AOTAutograd wants tensors saved without a version check last."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _forward(joint: FusedJoint) -> FusedEmitter:
    def lost(node: fx.Node) -> fx.Node:
        raise RewriteError(f"the schedule reads {node.name} in forward where it is not live")

    forward = FusedEmitter(joint, lost)
    for node in joint.placeholders:
        if not is_tangent(node):
            forward.put(node, placeholder_like(forward.graph, node.name, node))
    return forward


def _backward(
    joint: FusedJoint, forward: FusedEmitter, saved: dict[fx.Node, fx.Node]
) -> FusedEmitter:
    """An emitter whose demands are met by saving from forward."""

    def save(node: fx.Node) -> fx.Node:
        if node in saved:
            raise RewriteError(f"the schedule reads {node.name} after it was dropped")
        forward.resolve(node)
        saved[node] = placeholder_like(backward.graph, node.name, node)
        return saved[node]

    backward = FusedEmitter(joint, save)
    for node in joint.placeholders:
        if is_tangent(node):
            backward.put(node, placeholder_like(backward.graph, node.name, node))
    return backward


def _bring_in(
    joint: FusedJoint,
    backward: FusedEmitter,
    kept: list[fx.Node],
    saved: dict[fx.Node, fx.Node],
) -> None:
    """Put backward's inputs first: what is saved, then the tangents."""
    tangents = [backward.resolve(node) for node in joint.placeholders if is_tangent(node)]
    for node in reversed([*(saved[n] for n in kept), *tangents]):
        next(iter(backward.graph.nodes)).prepend(node)


def _module(joint: FusedJoint, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(joint.module, graph)
