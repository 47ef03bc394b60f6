"""What both emitters share; forward comes first, and returns also what backward asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.graph import Op, Tier, TrainingGraph
from remat.graph_capture.joint.nodes import is_tangent
from remat.graph_capture.torch_private.core import pytree
from remat.schedules.kept_in_forward import end_of_forward, live_after_forward
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step


class LowerTierCopy(NamedTuple):
    value: str
    tier: Tier

    def __str__(self) -> str:
        return f"{self.value}_{self.tier}"


_NO_VERSION = "saved_tensor_with_no_vc_check"
Demanded = fx.Node | str | LowerTierCopy  # a node of the joint graph, a random state, or a copy
Demand = Callable[[Demanded], fx.Node]  # asks the graph before for what this one lacks


class _JointGraph(Protocol):
    module: fx.GraphModule
    graph: TrainingGraph
    node_of_op: dict[str, fx.Node]
    base_of_value: dict[str, fx.Node]


_AnyJoint = TypeVar("_AnyJoint", bound=_JointGraph)


class Emitter(ABC, Generic[_AnyJoint]):
    """Emits one of the two graphs; `at` is the index of the step in the schedule."""

    cannot_move: ClassVar[str]  # why a step that copies a value to the host is refused

    def __init__(self, joint: _AnyJoint, demand: Demand) -> None:
        self.joint, self.demand = joint, demand
        self.graph = fx.Graph()
        # What the graph has demanded: the node of the graph before it, and the placeholder.
        self.brought: dict[Demanded, tuple[fx.Node, fx.Node]] = {}
        self.copies: dict[fx.Node, fx.Node] = {}  # what stands for a joint node
        self.copied: dict[str, list[fx.Node]] = {}
        self.bases = set(joint.base_of_value.values())
        self.at = 0

    def take_inputs(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        taken = {node: placeholder_like(self.graph, node.name, node) for node in nodes}
        for node, placeholder in taken.items():
            self.put(node, placeholder)
        return list(taken.values())

    def put(self, node: fx.Node, copy: fx.Node) -> None:
        """Let `copy` stand for `node` until one of the values behind it is freed."""
        self.copies[node] = copy
        self.note_copied(node)

    def note_copied(self, node: fx.Node) -> None:
        for value in self.values_behind(node):
            self.copied.setdefault(value, []).append(node)

    def carry_out(self, steps: Iterable[Step], first: int = 0) -> None:
        for self.at, step in enumerate(steps, start=first):
            if isinstance(step, Compute):
                if step.at != "device":
                    raise RewriteError(
                        f"solve without computing on the {step.at}: the schedule runs {step.op} "
                        "there, and a rewritten module runs all ops on its device"
                    )
                self.compute(self.joint.graph.ops[self.joint.graph.op_index[step.op]])
            elif isinstance(step, Free):
                self.drop(step)
            else:
                self.move(step)

    def drop(self, step: Free) -> None:
        """Emit what drops a copy of a value."""
        self.free(step.value)

    def move(self, step: Offload | Fetch) -> None:
        """Emit what copies a value; `RewriteError` of an emitter that emits no copies."""
        raise RewriteError(
            f"solve without offloading: the schedule copies {step.value} to the host, "
            f"{self.cannot_move}"
        )

    def free(self, value: str) -> None:
        for node in self.copied.pop(value, ()):
            self.forget(node)

    def forget(self, node: fx.Node) -> None:
        self.copies.pop(node, None)

    @abstractmethod
    def values_behind(self, node: fx.Node) -> tuple[str, ...]:
        """The values that must live as long as a copy of `node` stands for it."""

    @abstractmethod
    def compute(self, op: Op) -> None:
        """Emit one run of `op`."""

    @abstractmethod
    def resolve(self, node: fx.Node) -> fx.Node:
        """The emitted node that stands for `node`; what takes no storage is emitted here."""

    def kept(self, what: Demanded) -> fx.Node:
        """The emitted node to save for the graph after this one, which demands `what`."""
        assert isinstance(what, fx.Node)
        return self.resolve(what)

    def bring(self, what: Demanded) -> fx.Node:
        """A new placeholder for what the graph before this one saves."""
        if what in self.brought:  # saved values enter once: the schedule has dropped them since
            raise RewriteError(f"the schedule reads {what} after dropping it")
        saved = self.demand(what)
        placeholder = placeholder_like(self.graph, str(what), saved)
        self.brought[what] = saved, placeholder
        return placeholder

    def results(self, results: Iterable[Any]) -> list[Any]:
        return [self.resolve(r) if isinstance(r, fx.Node) else r for r in results]

    def gradients(self, results: Sequence[Any]) -> list[Any]:
        return self.results(results)

    def entering(self, node: fx.Node) -> fx.Node | None:
        """A constant, an input, or what forward left; None for what follows from live values."""
        if node.op == "get_attr":
            return self.graph.node_copy(node)
        if node.op == "placeholder" or node in self.bases:
            return self.bring(node)
        if node.name in self.joint.node_of_op:  # an op made it; the schedule dropped it since
            raise RewriteError(f"the schedule reads {node.name} where it is not live")
        return None

    def copy_of(self, node: fx.Node, name: str, resolve: Callable[[fx.Node], fx.Node]) -> fx.Node:
        args, kwargs = self.arguments(node, resolve)
        return self.call(node.target, args, kwargs, name, node.meta)

    def call(self, target: Any, args: Any, kwargs: Any, name: str | None, meta: Any) -> fx.Node:
        made = self.graph.create_node("call_function", target, args, kwargs, name)
        made.meta = dict(meta)
        return made

    def arguments(
        self, node: fx.Node, resolve: Callable[[fx.Node], fx.Node]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return pytree.tree_map_only(fx.Node, resolve, (tuple(node.args), dict(node.kwargs)))


def emit_both(
    joint: _JointGraph, schedule: Schedule, n_outputs: int,
    start: Callable[[Demand, frozenset[str]], Emitter[Any]],
) -> tuple[fx.Graph, fx.Graph]:  # fmt: skip
    # AOTAutograd's contract: forward returns results, then saved; backward takes saved, tangents.
    if (end := end_of_forward(joint.graph, schedule)) is None:
        runs, ops = schedule.computations(), joint.graph.ops
        never = min(op.name for op in ops if op.phase == "forward" and not runs[op.name])
        raise RewriteError(f"the schedule never computes {never}")
    inputs = joint.module.graph.find_nodes(op="placeholder")
    returned = joint.module.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    forward = start(_refuse, frozenset())
    forward.take_inputs(node for node in inputs if not is_tangent(node))
    forward.carry_out(schedule.steps[:end])
    given = forward.results(returned[:n_outputs])
    backward = start(forward.kept, live_after_forward(joint.graph, schedule))
    tangents = backward.take_inputs(node for node in inputs if is_tangent(node))
    backward.carry_out(schedule.steps[end:], first=end)
    gradients = backward.gradients(returned[n_outputs:])
    brought = backward.brought.values()  # placeholders come first, unversioned tensors last
    saved = sorted(brought, key=lambda pair: pair[0].meta.get(_NO_VERSION, False))
    for node in reversed([*(placeholder for _, placeholder in saved), *tangents]):
        next(iter(backward.graph.nodes)).prepend(node)
    forward.graph.output((*given, *(node for node, _ in saved)))
    backward.graph.output(tuple(gradients))
    return forward.graph, backward.graph


def placeholder_like(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = dict(like.meta)
    return node


def as_module(joint: _JointGraph, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(joint.module, graph)


def _refuse(what: Demanded) -> fx.Node:
    raise RewriteError(f"the schedule reads {what} in forward where it is not live")
