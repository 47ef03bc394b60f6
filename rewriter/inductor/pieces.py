"""A graph as pieces, each compiled by Inductor, and what runs between them as it stands.

Copies between tiers, releases of gradients, and reads of random states and of numbers are nothing
that Inductor would keep in its place. So the graph is cut there, and its memory is replayed piece
by piece.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from remat.graph_capture.devices.known_devices import allocator_rounding
from remat.graph_capture.joint.nodes import copy_of, is_getitem, is_tangent
from remat.graph_capture.torch_private.core import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    TracingContext,
    holds_tangents,
    tracing,
)
from remat.graph_capture.torch_private.inductor import compile_fx_inner
from remat.rewriter.graphs.codegen import boxed, dead_after, release_gradients
from remat.rewriter.inductor.fused_nodes import shares_storage
from remat.rewriter.inductor.lowering import lower
from remat.rewriter.inductor.replay import CallWorkspaces, LiveStorages, bring_tangents

_PIECE = "inductor_piece"  # in the `meta` of the node that runs one: its graph
_Edit = Callable[[fx.GraphModule], fx.GraphModule]


def in_pieces(gm: fx.GraphModule, edit: _Edit) -> fx.GraphModule:
    """`gm` with one node for each piece, whose graph `edit` has changed."""
    return _Cutter(gm, edit).cut()


def _is_between(node: fx.Node) -> bool:
    while is_getitem(node):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    is_op = isinstance(node.target, OpOverload | HigherOrderOperator)
    return node.op == "call_function" and not is_op


class _Cutter:
    def __init__(self, gm: fx.GraphModule, edit: _Edit) -> None:
        self.gm, self.edit, self.graph = gm, edit, fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.waiting: list[fx.Node] = []

    def cut(self) -> fx.GraphModule:
        for node in _results_together(self.gm.graph):
            if node.op == "call_function" and not _is_between(node):
                self.waiting.append(node)
                continue
            if node.op in ("call_function", "output"):
                self._end_piece()
            self.made[node] = self._copy(node)
        return fx.GraphModule(self.gm, self.graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, self.made.__getitem__)
        if node.op == "get_attr":
            copy.meta["val"] = getattr(self.gm, str(node.target))
        return copy

    def _end_piece(self) -> None:
        nodes, self.waiting = self.waiting, []
        if all(map(shares_storage, nodes)):  # no code is made for views alone
            for node in nodes:
                self.made[node] = self._copy(node)
            return
        inside = set(nodes)
        taken = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        given = [node for node in nodes if not inside.issuperset(node.users)]
        call = self.graph.call_function(_not_compiled, ([self.made[node] for node in taken],))
        call.meta[_PIECE] = self.edit(self._piece(nodes, taken, given))
        for i, node in enumerate(given):
            self.made[node] = self.graph.call_function(operator.getitem, (call, i))
            self.made[node].meta = dict(node.meta)

    def _piece(
        self, nodes: Sequence[fx.Node], taken: Sequence[fx.Node], given: Sequence[fx.Node]
    ) -> fx.GraphModule:
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in taken:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(self.made[node].meta)
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in given))
        return fx.GraphModule(self.gm, graph)


def _results_together(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes; elements of a tuple, which does not cross a cut, right after it."""

    def with_elements(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for user in node.users:
            if is_getitem(user) and user.args[0] is node:
                yield from with_elements(user)

    for node in graph.nodes:
        if not is_getitem(node):
            yield from with_elements(node)


def _not_compiled(given: list[Any]) -> Any:
    raise AssertionError("a piece runs before it is compiled")


def compiled_pieces(
    gm: fx.GraphModule, mode: FakeTensorMode, *, is_backward: bool
) -> fx.GraphModule:
    """`gm`, whose pieces are Inductor's code."""
    made = copy_of(gm)
    asked: Any = {"is_backward": is_backward, "static_input_idxs": ()}
    # In a context of its own, or AOTAutograd would take a piece's results for those of the graph.
    with tracing(TracingContext(mode)):
        for node in made.graph.nodes:
            if _PIECE in node.meta:
                piece = copy_of(node.meta[_PIECE])
                node.target = _boxed_code(compile_fx_inner(piece, inputs_of(piece, mode), **asked))
    return made


def _boxed_code(code: Any) -> Callable[[list[Any]], Any]:
    def piece(given: list[Any]) -> Any:
        return code(given)

    return boxed(piece)


def inputs_of(gm: fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return [
        mode.from_tensor(v, static_shapes=True)
        if isinstance(v, Tensor) and not isinstance(v, FakeTensor)
        else v
        for v in values
    ]


# What the code of both graphs allocates, and what runs between.

_Held = dict[fx.Node, list[int]]


class PieceReplay:
    """Replays graphs in pieces. `released`: bytes that a release of gradients at places takes."""

    def __init__(
        self, mode: FakeTensorMode, workspaces: CallWorkspaces,
        released: Callable[[tuple[int, ...]], int], device: str,
    ) -> None:  # fmt: skip
        self.mode, self.workspaces, self.released = mode, workspaces, released
        self.rounded = allocator_rounding(device)

    def peak_bytes(self, forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int) -> int:
        """The most bytes beyond inputs of the step."""
        run = LiveStorages(self.workspaces, held=set())
        inputs = forward.graph.find_nodes(op="placeholder")
        kept = self._carry_out(run, forward, {node: [run.storage(0)] for node in inputs})
        then = LiveStorages(self.workspaces, held=set())
        # One numbering for both graphs: what is saved keeps its number.
        then.size_bytes, then.holders = run.size_bytes, [0] * len(run.size_bytes)
        then.bring("their outputs", sorted({n for held in kept[:n_outputs] for n in held}))
        placeholders = backward.graph.find_nodes(op="placeholder")
        tangents = [node for node in placeholders if is_tangent(node)]
        saved = [node for node in placeholders if not is_tangent(node)]
        given = dict(zip(saved, kept[n_outputs:], strict=True))
        bring_tangents(then, [*map(_name, tangents)], tangents)
        given |= {node: then.names[_name(node)] for node in tangents}
        for node in tangents:  # `backward()` holds the gradient that it makes for the loss
            if holds_tangents() or node.meta["val"].numel() == 1:
                then.bring(f"held {node.name}", given[node])
        self._carry_out(then, backward, given, is_backward=True)
        return max(run.peak_bytes, then.peak_bytes)

    def _carry_out(
        self, run: LiveStorages, gm: fx.GraphModule, given: _Held, *, is_backward: bool = False
    ) -> list[list[int]]:
        nodes = list(gm.graph.nodes)
        returned: Any = nodes[-1].args[0]
        # Without a release, the caller has the gradients of backward to its end.
        early = {one for node in nodes if _releases(node) for one in node.all_input_nodes}
        left = [one for one in returned if isinstance(one, fx.Node) and one not in early]
        dead = dead_after(nodes, left)
        for node, storages in given.items():
            run.bring(_name(node), storages)
        for node in given:
            if not node.users:
                run.drop(_name(node))
        for node in nodes[:-1]:
            if _PIECE in node.meta:
                self._run_piece(run, node, dead.pop(node, []), is_backward=is_backward)
            elif _name(node) not in run.names:
                run.bring(_name(node), self._made_between(run, node))
            for one in dead.get(node, []):
                run.drop(_name(one))
        return [run.names.get(_name(one), []) if one in left else [] for one in returned]

    def _run_piece(
        self, run: LiveStorages, node: fx.Node, dead: Sequence[fx.Node], *, is_backward: bool
    ) -> None:
        piece, taken = node.meta[_PIECE], node.args[0]
        results: Any = piece.graph.output_node().args[0]
        lowered = lower(
            piece, inputs_of(piece, self.mode), is_backward=is_backward,
            visible=range(len(results)),
        )  # fmt: skip
        before = set(run.names)
        for name, one in zip(lowered.inputs, taken, strict=True):  # pyright: ignore
            run.bring(name, run.names[_name(one)])
        for one in dead:  # the code has the last hold on what nothing reads later
            run.drop(_name(one))
        run.carry_out(lowered)
        made = [run.names.get(name or "", []) for name in lowered.outputs]
        for user in node.users:
            run.bring(_name(user), made[user.args[1]])  # pyright: ignore
        for name in list(run.names):
            if name not in before and name[0] != _OUTSIDE:
                run.drop(name)

    def _made_between(self, run: LiveStorages, node: fx.Node) -> list[int]:
        name = getattr(node.target, "__name__", "")
        if name == "fetch":
            back = next(user for user in node.users if "val" in user.meta)
            size_bytes = back.meta["val"].untyped_storage().nbytes()
            return [run.storage(self.rounded(size_bytes))]
        if name == "arrive" or isinstance(node.target, OpOverload):  # the same storage
            return run.names[_name(node.all_input_nodes[0])]
        if _releases(node):
            places: Any = node.args[0]
            run.peak_bytes = max(run.peak_bytes, run.live_bytes + self.released(places))
        return []


_OUTSIDE = "."


def _name(node: fx.Node) -> str:
    return f"{_OUTSIDE}{node.name}"  # other than names within the code of a piece


def _releases(node: fx.Node) -> bool:
    return node.target is release_gradients
