"""From an emitted graph of ATen ops to what Inductor compiles, with the same schedule.

Ops are decomposed as Inductor wants them. Each result that the schedule keeps while a later call
runs is stored where it is made, as in `emit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.dropout import DROPOUT_BACKWARD
from remat.graph_capture.joint.nodes import is_getitem, mutates, target_name
from remat.graph_capture.joint.provenance import FUNCTION_KEY, SOURCE_KEY
from remat.rewriter.inductor.emit import MOVED, REALIZE
from remat.rewriter.inductor.nodes import is_generated, is_inlined, is_view

aten = torch.ops.aten


def decomposed(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """`gm` decomposed, with what lasts stored. Placeholders keep their names.

    Raises
    ------
    RewriteError : a decomposition writes to a tensor.
    """
    graph = _decomposed(gm, mode)
    for node in graph.graph.nodes:
        if node.op == "call_function" and mutates(node):
            raise RewriteError(
                f"Inductor decomposes {_place_of(node)} into {target_name(node)}, which writes to "
                "its argument, so a plan's order cannot be kept in its code. Leave out "
                "compile=True, which runs eager's ops"
            )
    return _with_stored_results(graph)


def _place_of(node: fx.Node) -> str:
    """The user's call behind a node, with its line where it is known."""
    place = node.meta.get("custom") or {}
    name, line = place.get(FUNCTION_KEY) or "an op of this step", place.get(SOURCE_KEY, "")
    return f"{name} ({line})" if line else name


def inputs_of(gm: fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    """A fake tensor for each placeholder that holds a tensor; other values stay as they are."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return [
        mode.from_tensor(v) if isinstance(v, Tensor) and not isinstance(v, FakeTensor) else v
        for v in values
    ]


def _decomposed(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    inputs = inputs_of(gm, mode)
    table = select_decomp_table()
    table = {**table, DROPOUT_BACKWARD: table[aten.native_dropout_backward.default]}
    with mode, preserve_node_meta(), torch.no_grad():
        run = _OfTracedDtypes(gm).run
        graph = make_fx(run, decomposition_table=table, tracing_mode="real")(*inputs)
    before = gm.graph.find_nodes(op="placeholder")
    after = graph.graph.find_nodes(op="placeholder")
    for old, new, value in zip(before, after, inputs, strict=True):
        new.target, new.meta["val"] = old.target, value
        new._rename(str(old.target))
    return graph


class _OfTracedDtypes(fx.Interpreter):
    """Runs a graph, and gives what decompositions return the dtypes that eager's kernels return.

    The other graph of the step reads what this one saves by those. On a CPU, decomposed norms
    return the statistics of bfloat16 inputs in bfloat16, where the kernels have float32.
    """

    def run_node(self, n: fx.Node) -> Any:
        """What a node returns, of the dtype that it was traced with."""
        return _of_dtypes(super().run_node(n), n.meta.get("val"))


def _of_dtypes(found: Any, traced: Any) -> Any:
    if isinstance(found, (tuple, list)) and isinstance(traced, (tuple, list)):
        pairs = zip(cast("Sequence[Any]", found), cast("Sequence[Any]", traced), strict=True)
        return type(found)(_of_dtypes(*pair) for pair in pairs)
    if isinstance(found, Tensor) and isinstance(traced, Tensor) and found.dtype != traced.dtype:
        return found.to(traced.dtype)
    return found


def _with_stored_results(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with `realize` between each result that lasts and the kernels that read it."""
    lasting = _lasting(list(gm.graph.nodes))
    graph = fx.Graph()
    copies: dict[tuple[fx.Node, bool], fx.Node] = {}

    def read(node: fx.Node, in_kernel: bool) -> fx.Node:
        if (node, in_kernel) not in copies:
            copies[node, in_kernel] = graph.node_copy(node, lambda n: read(n, in_kernel))
        return copies[node, in_kernel]

    for node in gm.graph.nodes:
        if is_view(node):
            continue
        in_kernel = node.op == "call_function" and is_generated(node)
        copy = graph.node_copy(node, lambda n, k=in_kernel: read(n, k))
        copies[node, False] = copies[node, True] = copy
        if node in lasting:
            stored = graph.call_function(REALIZE, (copy,))
            stored.meta = dict(node.meta)
            copies[node, True] = stored
    graph.lint()
    return fx.GraphModule(gm, graph)


def _lasting(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Results of kernels, or of calls that Inductor moves, that a node after a later call reads."""
    place = {node: i for i, node in enumerate(nodes)}
    calls = [i for i, node in enumerate(nodes) if _is_call(node)]
    last = dict(place)
    for node in reversed(nodes):
        for source in node.all_input_nodes:
            last[source] = max(last[source], last[node] if is_view(node) else place[node])
    found: set[fx.Node] = set()
    for node in nodes:
        could_move = is_inlined(node) or node.target in MOVED
        if could_move and any(place[node] < at < last[node] for at in calls):
            found.add(node)
    return found


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and not (
        is_generated(node) or is_view(node) or is_getitem(node)
    )
