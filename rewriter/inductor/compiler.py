"""Inductor in place of our own generated code: the compiler of a schedule's two graphs.

Unlike in Inductor alone, draws are functions of the stream's state (`as_tensors.py`), what lasts
across a call is stored (`decomposed`), results keep their strides, and what is no op runs between
pieces (`pieces.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.exact_ops import DROPOUT_BACKWARD
from remat.graph_capture.joint.nodes import aten, copy_of, mutates, target_name
from remat.graph_capture.joint.provenance import FUNCTION_KEY, SOURCE_KEY
from remat.graph_capture.torch_private.core import FakeTensor, FakeTensorMode
from remat.graph_capture.torch_private.inductor import REALIZE, select_decomp_table
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.graphs.emit import FloatSource, emit
from remat.rewriter.inductor.as_tensors import (
    make_draws_functional,
    numbers_as_tensors,
    underlying,
)
from remat.rewriter.inductor.fused_graph import MOVED
from remat.rewriter.inductor.fused_nodes import is_call, is_generated, is_inlined, shares_storage
from remat.rewriter.inductor.kernel_costs import CallCosts
from remat.rewriter.inductor.partition import calls_in_order
from remat.rewriter.inductor.pieces import PieceReplay, compiled_pieces, in_pieces, inputs_of
from remat.rewriter.tiers.file_tier import FileTier
from remat.schedules.schedule import Schedule


def decomposed(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """`gm` as Inductor wants it, with what lasts across a call stored, by the same schedule."""
    graph = _decomposed(gm, mode)
    for node in graph.graph.nodes:
        if node.op == "call_function" and mutates(node):
            raise RewriteError(
                "leave out compile=True, which runs eager's ops: Inductor decomposes "
                f"{_place_of(node)} into {target_name(node)}, which writes to its argument, so "
                "its code cannot keep a plan's order"
            )
    return _with_stored_results(graph)


def _place_of(node: fx.Node) -> str:
    place = node.meta.get("custom") or {}
    name, line = place.get(FUNCTION_KEY) or "an op of this step", place.get(SOURCE_KEY, "")
    return f"{name} ({line})" if line else name


def _decomposed(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    inputs = inputs_of(gm, mode)
    table = select_decomp_table()
    # Our exact dropout's backward takes what torch's does.
    table = {**table, DROPOUT_BACKWARD: table[aten.native_dropout_backward.default]}
    with mode, preserve_node_meta(), torch.no_grad():
        run = _OfTracedDtypes(gm).run
        # The inputs are fake already.
        graph = make_fx(run, decomposition_table=table, tracing_mode="real")(*inputs)
    before = gm.graph.find_nodes(op="placeholder")
    after = graph.graph.find_nodes(op="placeholder")
    for old, new, value in zip(before, after, inputs, strict=True):
        new.target, new.meta["val"] = old.target, value
        new._rename(str(old.target))
    return graph


class _OfTracedDtypes(fx.Interpreter):
    """Runs a graph, and gives what decompositions return the dtypes of eager's kernels."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is DROPOUT_BACKWARD and isinstance(args[2], Tensor):  # which the op does not take
            return select_decomp_table()[aten.native_dropout_backward.default](*args)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        # The other graph reads saved values by these; decomposed norms may return bfloat16.
        return _of_dtypes(super().run_node(n), n.meta.get("val"))


def _of_dtypes(found: Any, traced: Any) -> Any:
    if isinstance(found, (tuple, list)) and isinstance(traced, (tuple, list)):
        pairs = zip(cast("Sequence[Any]", found), cast("Sequence[Any]", traced), strict=True)
        return type(found)(_of_dtypes(*pair) for pair in pairs)
    if isinstance(found, Tensor) and isinstance(traced, Tensor) and found.dtype != traced.dtype:
        return found.to(traced.dtype)
    return found


def _with_stored_results(gm: fx.GraphModule) -> fx.GraphModule:
    lasting = _lasting(list(gm.graph.nodes))
    graph = fx.Graph()
    copies: dict[tuple[fx.Node, bool], fx.Node] = {}

    def read(node: fx.Node, in_kernel: bool) -> fx.Node:
        if (node, in_kernel) not in copies:
            copies[node, in_kernel] = graph.node_copy(node, lambda n: read(n, in_kernel))
        return copies[node, in_kernel]

    for node in gm.graph.nodes:
        if shares_storage(node):  # kernels and calls read views of different nodes
            continue
        in_kernel = node.op == "call_function" and is_generated(node)
        copy = graph.node_copy(node, lambda n, k=in_kernel: read(n, k))
        copies[node, False] = copies[node, True] = copy
        if node in lasting:
            stored = graph.call_function(REALIZE, (copy,))  # or each reader would compute it again
            stored.meta = dict(node.meta)
            copies[node, True] = stored
    graph.lint()
    return fx.GraphModule(gm, graph)


def _lasting(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Results of kernels, or of calls that Inductor moves, that a node after a later call reads."""
    place = {node: i for i, node in enumerate(nodes)}
    calls = [i for i, node in enumerate(nodes) if is_call(node)]
    last = dict(place)
    for node in reversed(nodes):
        for source in node.all_input_nodes:
            last[source] = max(last[source], last[node] if shares_storage(node) else place[node])
    found: set[fx.Node] = set()
    for node in nodes:
        could_move = is_inlined(node) or node.target in MOVED
        if could_move and any(place[node] < at < last[node] for at in calls):
            found.add(node)
    return found


class InductorStep:
    """The two graphs of a step in pieces, which Inductor compiles."""

    def __init__(self, joint: Joint, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self._joint = joint
        values = (node.meta.get("val") for node in forward.graph.find_nodes(op="placeholder"))
        self._mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        self.forward, self.backward = self._in_pieces(forward), self._in_pieces(backward)

    def peak_bytes(self) -> int:
        """Peak of the step in Inductor's code, generated and replayed; resident bytes count."""
        device = self._joint.graph.device
        costs = CallCosts(self.forward, device)

        def workspaces(calls: Sequence[fx.Node]) -> list[int]:
            return [cost.workspace_bytes for cost in costs.of(map(underlying, calls))]

        run = PieceReplay(self._mode, workspaces, self._released_bytes, device)
        with calls_in_order(True), torch.no_grad():
            peak_bytes = run.peak_bytes(
                self.forward, self.backward, self._joint.num_forward_outputs
            )
        return self._joint.graph.resident.total_bytes + peak_bytes

    def _released_bytes(self, places: tuple[int, ...]) -> int:
        named = self._joint.accumulations.items()
        op = next(name for name, released in named if released == places)
        return self._joint.graph.ops[self._joint.graph.op_index[op]].workspace_bytes

    def compiled_forward(self, gm: fx.GraphModule) -> fx.GraphModule:
        return self._compiled(self.forward, gm, is_backward=False)

    def compiled_backward(self, gm: fx.GraphModule) -> fx.GraphModule:
        return self._compiled(self.backward, gm, is_backward=True)

    def _in_pieces(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = copy_of(gm)
        make_draws_functional(graph)
        numbers_as_tensors(graph)
        return in_pieces(graph, self._edited)

    def _edited(self, piece: fx.GraphModule) -> fx.GraphModule:
        graph = decomposed(piece, self._mode)
        end = graph.graph.output_node()
        returned: Any = end.args[0]
        end.meta["user_visible_output_idxs"] = [  # users and other pieces rely on traced strides
            i for i, result in enumerate(returned) if isinstance(result, fx.Node)
        ]
        return graph

    def _compiled(
        self, planned: fx.GraphModule, gm: fx.GraphModule, *, is_backward: bool
    ) -> fx.GraphModule:
        _require_same_inputs(planned, gm)
        with calls_in_order(True), torch.no_grad():
            return compiled_pieces(planned, self._mode, is_backward=is_backward)


def code_peak_bytes(traced: Trace, schedule: Schedule) -> int:
    tier = FileTier(0, 0, "") if schedule.moves else None  # it stands for any: nothing is copied
    floats = FloatSource(traced.floats) if traced.floats else None
    if floats:
        floats.inputs.mark(traced.joint.module)
    graphs = emit(traced.joint, schedule, floats, writes=False, tier=tier)
    return InductorStep(traced.joint, *graphs).peak_bytes()


def _require_same_inputs(planned: fx.GraphModule, gm: fx.GraphModule) -> None:
    # AOTAutograd may add inputs of its own after it has called the partitioner.
    given = [node.target for node in gm.graph.find_nodes(op="placeholder")]
    known = [node.target for node in planned.graph.find_nodes(op="placeholder")]
    if given != known:
        other = next((n for n in (*given, *known) if n not in given or n not in known), given[0])
        raise RewriteError(
            "leave out compile=True, which runs eager's ops: AOTAutograd calls the step with "
            f"other inputs than planned ({other}), as where forward makes random numbers or "
            "effect tokens with an op of its own"
        )
