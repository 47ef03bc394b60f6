"""Schedule → two fx graphs: the forward and the backward that carry it out step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.joint.batch_norm import AGAIN
from remat.graph_capture.joint.build import SAVE_RNG, STATISTICS, TANGENTS, Joint
from remat.graph_capture.joint.nodes import (
    drawn_on,
    draws_randomness,
    is_alias_of_input,
    is_getitem,
    is_tangent,
)
from remat.rewriter.graphs.fewer_views import leave_out_views
from remat.rewriter.graphs.rng import run_with_rng_state, save_rng_state
from remat.schedules.kept_in_forward import end_of_forward, live_after_forward
from remat.schedules.schedule import Compute, Free, Schedule, Step

RNG_STATE = "rng_state_"

Demand = Callable[[str, fx.Node | None], fx.Node]


class PhaseEmitter:
    """Emits one of the two graphs.

    Parameters
    ----------
    joint : what names stand for. demand : called with a value's name and its base node
        (None for a saved RNG state) when the value is not in this graph yet; returns
        the placeholder that brings it.
    again : names of ops that have run before; updated as ops are emitted.
    kept : values that the graph before this one left live; what an op that runs again makes of
        them is not theirs.
    """

    def __init__(
        self,
        joint: Joint,
        demand: Demand,
        again: set[str],
        repeated: set[str],
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.demand = demand
        self.again = again
        self.repeated = repeated
        self.kept = set(kept)
        self.copies: dict[str, dict[fx.Node, fx.Node]] = {}
        self.tuples: dict[fx.Node, fx.Node] = {}
        self.states: dict[str, fx.Node] = {}
        self.updates: dict[str, tuple[fx.Node, fx.Node]] = {}

    def put(self, node: fx.Node, copy: fx.Node) -> None:
        """Let `copy` stand for `node` as long as its value lives."""
        self.copies.setdefault(self.joint.value_of_node.get(node, ""), {})[node] = copy

    def step(self, step: Step) -> None:
        """Emit one step of the schedule."""
        if isinstance(step, Compute):
            self._compute(self.joint.graph.ops[self.joint.graph.op_index[step.op]])
        elif isinstance(step, Free):
            self.kept.discard(step.value)
            self.copies.pop(step.value, None)
            self.states.pop(step.value, None)
        else:
            raise RewriteError(
                f"the schedule moves {step.value} to the host, which this release cannot rewrite: "
                "solve without offloading"
            )

    def resolve(self, node: fx.Node) -> fx.Node:
        """The emitted node that stands for `node`; views are replayed where needed."""
        value = self.joint.value_of_node.get(node, "")
        known = self.copies.get(value, {}).get(node)
        if known is not None:
            return known
        if is_alias_of_input(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            copy = self.resolve(source)
        elif node.op == "get_attr":
            copy = self.graph.node_copy(node)
        elif node.op == "placeholder" or self.joint.base_of_value.get(value) is node:
            copy = self.demand(value, node)
        elif node.name in self.joint.node_of_op:
            raise RewriteError(f"the schedule reads {node.name} where it is not live")
        else:
            copy = self._copy(node, node.name)
        self.put(node, copy)
        return copy

    def results(self, results: list[Any]) -> list[Any]:
        """Emitted nodes of some of the joint graph's results."""
        return [self.resolve(r) if isinstance(r, fx.Node) else r for r in results]

    def _copy(self, node: fx.Node, name: str) -> fx.Node:
        args, kwargs = self._arguments(node)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, name)
        copy.meta = dict(node.meta)
        return copy

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def resolved(leaf: Any) -> Any:
            return self.resolve(leaf) if isinstance(leaf, fx.Node) else leaf

        return pytree.tree_map(resolved, (tuple(node.args), dict(node.kwargs)))

    def _compute(self, op: Op) -> None:
        again = op.name in self.again
        self.again.add(op.name)
        if op.target == TANGENTS:
            return
        if op.target == SAVE_RNG:
            self._save_rng_state(op)
        elif op.target == STATISTICS:
            for name in op.outputs:
                if name in self.updates:
                    self.put(*self.updates.pop(name))
        else:
            self._run(op, self.joint.node_of_op[op.name], again)

    def _save_rng_state(self, op: Op) -> None:
        """Save the state only if the op that draws from it will draw again."""
        drawing = op.name.removeprefix(RNG_STATE)
        if drawing in self.repeated:
            device = str(drawn_on(self.joint.node_of_op[drawing]))
            state = self.graph.create_node("call_function", save_rng_state, (device,), {}, op.name)
            state.meta["val"] = save_rng_state(device)
            self.states[op.outputs[0]] = state

    def _run(self, op: Op, node: fx.Node, again: bool) -> None:
        if again and draws_randomness(node):
            copy = self._draw_again(op, node)
        elif again and node.target in AGAIN:
            copy = self._normalise_again(node)
        else:
            copy = self._copy(node, f"{node.name}_again" if again else node.name)
        if isinstance(node.meta.get("val"), (tuple, list)):
            self.tuples[node] = copy
            for picked, result in self._picked_results(node, op):
                self.put(picked, result)
            if not again:
                self._pick_updates(node, op)
        else:
            self.put(node, copy)

    def _draw_again(self, op: Op, node: fx.Node) -> fx.Node:
        name = f"{RNG_STATE}{op.name}"
        state = self.states.get(name)
        if state is None:
            state = self.states[name] = self.demand(name, None)
        args, kwargs = self._arguments(node)
        taken: tuple[Any, ...] = (state, str(drawn_on(node)), node.target, *args)
        copy = self.graph.create_node(
            "call_function", run_with_rng_state, taken, kwargs, f"{node.name}_again"
        )
        copy.meta = dict(node.meta)
        return copy

    def _normalise_again(self, node: fx.Node) -> fx.Node:
        """Batch norm without its running statistics, which were updated the first time."""
        read = [self.resolve(a) if isinstance(a, fx.Node) else a for a in node.args[:3]]
        target, n_results = AGAIN[node.target]
        taken: tuple[Any, ...] = (*read, *node.args[5:])
        copy = self.graph.create_node("call_function", target, taken, {}, f"{node.name}_again")
        copy.meta = dict(node.meta)
        copy.meta["val"] = node.meta["val"][:n_results]
        return copy

    def _pick_updates(self, node: fx.Node, op: Op) -> None:
        """Take a batch norm's new statistics at once: its next run makes none.

        They wait for the op that updates the statistics, which may come much later; until
        then the tuple would keep all other results alive.
        """
        index = self.joint.graph.op_index.get(f"{op.name}_statistics")
        if index is not None:
            for picked, copy in self._picked_results(node, self.joint.graph.ops[index]):
                self.updates[self.joint.value_of_node[picked]] = picked, copy

    def _picked_results(self, node: fx.Node, op: Op) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Emit those of `op`'s outputs, results of `node`, that are not live already."""
        for name in op.outputs:
            picked = self.joint.base_of_value.get(name)
            is_live = name in self.kept or picked in self.copies.get(name, {})
            if picked is None or not is_getitem(picked) or is_live:
                continue
            copy = self.graph.create_node(
                "call_function", picked.target, (self.tuples[node], picked.args[1]), {}, picked.name
            )
            copy.meta = dict(picked.meta)
            yield picked, copy


def emit(joint: Joint, schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward GraphModules that carry out `schedule`.

    The pair obeys AOTAutograd's contract: the forward returns its own results, then the
    tensors saved for backward; the backward takes those, then the tangents, and returns
    the gradients.
    """
    end = require_end_of_forward(joint.graph, schedule)
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again: set[str] = set()
    forward = _start_forward(joint, again, repeated)
    for step in schedule.steps[:end]:
        forward.step(step)
    results = joint.module.graph.find_nodes(op="output")[0].args[0]
    assert isinstance(results, (tuple, list))
    given = forward.results(list(results[: joint.num_forward_outputs]))
    saved: list[fx.Node] = []
    kept = live_after_forward(joint.graph, schedule)
    backward = _start_backward(joint, again, repeated, forward, saved, kept)
    for step in schedule.steps[end:]:
        backward.step(step)
    gradients = backward.results(list(results[joint.num_forward_outputs :]))
    forward.graph.output(tuple(given) + tuple(saved))
    backward.graph.output(tuple(gradients))
    return _module(joint, forward.graph), _module(joint, backward.graph)


def require_end_of_forward(graph: TrainingGraph, schedule: Schedule) -> int:
    """Index after the step that first computes the last forward op.

    Raises
    ------
    RewriteError : one is never computed.
    """
    end = end_of_forward(graph, schedule)
    if end is None:
        runs = schedule.computations()
        never = min(op.name for op in graph.ops if op.phase == "forward" and not runs[op.name])
        raise RewriteError(f"the schedule never computes {never}")
    return end


def _start_forward(joint: Joint, again: set[str], repeated: set[str]) -> PhaseEmitter:
    def lost(value: str, node: fx.Node | None) -> fx.Node:
        raise RewriteError(f"the schedule reads {value} in forward where it is not live")

    forward = PhaseEmitter(joint, lost, again, repeated)
    for node in joint.module.graph.find_nodes(op="placeholder"):
        if not is_tangent(node):
            forward.put(node, placeholder_like(forward.graph, node.name, node))
    return forward


def _start_backward(
    joint: Joint,
    again: set[str],
    repeated: set[str],
    forward: PhaseEmitter,
    saved: list[fx.Node],
    kept: frozenset[str],
) -> PhaseEmitter:
    """An emitter whose demands are met by saving from forward."""

    def save(value: str, node: fx.Node | None) -> fx.Node:
        saved.append(forward.states[value] if node is None else forward.resolve(node))
        with backward.graph.inserting_before(first_tangent):
            return placeholder_like(backward.graph, value if node is None else node.name, saved[-1])

    backward = PhaseEmitter(joint, save, again, repeated, kept)
    tangents = [n for n in joint.module.graph.find_nodes(op="placeholder") if is_tangent(n)]
    for node in tangents:
        backward.put(node, placeholder_like(backward.graph, node.name, node))
    first_tangent = next(iter(backward.graph.nodes))
    return backward


def placeholder_like(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    """A new placeholder of that name, with the facts of another node."""
    node = graph.placeholder(name)
    node.meta = dict(like.meta)
    return node


def _module(joint: Joint, graph: fx.Graph) -> fx.GraphModule:
    leave_out_views(graph)
    graph.lint()
    return fx.GraphModule(joint.module, graph)
