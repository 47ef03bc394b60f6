"""Graphs that a node of Inductor's joint graph runs: branches, regions, bodies of loops.

Most are computed as they stand, as one call. Three kinds are refused, since torch itself gives them
wrong gradients: branches that draw, whose backward draws other numbers, in eager too; nested
compile regions, of which torch 2.13 made gradients that were off by half; and an
`autograd.Function` that writes to what it returns, whose backward torch 2.11 leaves out.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import draws_randomness
from remat.rewriter.inductor.nodes import DRAWS, SEEDS, place_of
from remat.rewriter.torch_compat import loses_gradients


def subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs that `node` is given, without those inside of these."""
    owner = node.graph.owning_module
    for source in node.all_input_nodes:
        if source.op == "get_attr" and owner is not None:
            module: object = attrgetter(str(source.target))(owner)
            if isinstance(module, fx.GraphModule):
                yield module.graph


def refuse_regions(graph: fx.Graph) -> None:
    """Raise `CaptureError` for a nested compile region in a graph of dynamo's.

    Inductor partitions the graph of a region by itself, before the one that it is part of.
    """
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.invoke_subgraph:
            raise CaptureError(
                f"{_where(node)} calls a nested compile region, of which torch makes wrong "
                "gradients: leave out torch.compiler.nested_compile_region under this backend"
            )


def refuse_lost_gradients(graph: fx.Graph) -> None:
    """Raise `CaptureError` for a function whose backward torch has left out of a graph of dynamo's.

    torch 2.11 returns all that a function's forward makes. Of two results that are one tensor, such
    as what was written to in place, it differentiates none.
    """
    if not loses_gradients():
        return
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.autograd_function_apply and _writes_result(node):
            raise CaptureError(
                f"{_where(node)} calls an autograd.Function whose forward writes in place to what "
                "it returns, and torch 2.11 leaves out its gradient: return a new tensor from it "
                "(y = x.clone().mul(2), not .mul_(2)), for collectives use those of "
                "torch.distributed._functional_collectives; or take torch 2.12 or later; or keep "
                "the function out of the graph by torch.compiler.disable"
            )
        if isinstance(node.target, HigherOrderOperator):
            for inner in subgraphs(node):
                refuse_lost_gradients(inner)


def _writes_result(node: fx.Node) -> bool:
    """Whether a result that is used of a function is, as a tensor, another of its results too."""
    body = next(subgraphs(node))
    (returned,) = body.find_nodes(op="output")
    results: Any = returned.args[0]
    values = [getattr(one, "meta", {}).get("example_value") for one in results[0]]
    made = Counter(id(value) for value in values if value is not None)
    used = [user.args[1] for user in node.users if user.target is operator.getitem]
    return any(made[id(value)] > 1 for i, value in enumerate(values) if i in used)


def refuse_drawing(graph: fx.Graph) -> None:
    """Raise `CaptureError` for a node that runs a graph which draws."""
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and any(
            map(_draws_inside, subgraphs(node))
        ):
            raise CaptureError(
                f"a graph that {node.target.name()} runs draws random numbers ({_where(node)}), "
                "and its backward draws others, in eager too: draw before it, and pass what was "
                "drawn as an operand"
            )


def _where(node: fx.Node) -> str:
    module, source = place_of(node)
    return ", ".join(filter(None, (module, source))) or "an unknown line"


def _draws_inside(graph: fx.Graph) -> bool:
    return any(
        draws_randomness(node)
        or node.target in DRAWS
        or node.target == SEEDS
        or any(map(_draws_inside, subgraphs(node)))
        for node in graph.nodes
    )
