"""Graphs that a node of Inductor's joint graph runs: branches, regions, bodies of loops.

Most are computed as they stand, as one call. Two kinds are refused, since torch itself gives them
wrong gradients: branches that draw, whose backward draws other numbers, in eager too; and nested
compile regions, of which torch 2.13 made gradients that were off by half.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import draws_randomness
from remat.rewriter.inductor.nodes import DRAWS, SEEDS, place_of


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
