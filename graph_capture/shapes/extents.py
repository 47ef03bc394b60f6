"""The shapes and bytes of a joint graph's values as expressions of the sizes that vary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph, Value
from remat.graph_capture.joint.nodes import is_tangent, result_bytes, tensors_of
from remat.graph_capture.shapes.environment import Environment
from remat.graph_capture.shapes.expressions import evaluated
from remat.graph_capture.shapes.ranged_graph import Extent
from remat.graph_capture.shapes.ranges import Sizes

Evaluated = tuple[Sizes, TrainingGraph]
"""Sizes, and the graph that was built of the trace at these sizes."""


def extents_of(
    gm: fx.GraphModule, env: Environment, graphs: Sequence[Evaluated]
) -> dict[str, Extent]:
    """What varies of each value that varies.

    Parameters
    ----------
    gm : the traced joint graph, with symbols. graphs : at some sizes, which the expressions are
        held against.

    Raises
    ------
    CaptureError : the shape of a value is not known as an expression, or not what it is at one of
        these sizes. The message names the op.
    """
    traced = dict(_traced_values(gm, env))
    found: dict[str, Extent] = {}
    for same in zip(*(graph.values for _, graph in graphs), strict=True):
        first = same[0]
        if all((v.shape, v.size_bytes) == (first.shape, first.size_bytes) for v in same):
            texts = traced.get(first.name)
            is_write = not first.size_bytes and not first.shape  # stands for one, and is no tensor
            if is_write or texts is None or _is_constant(texts):
                continue
        extent = traced.get(first.name) or traced.get(first.name.rpartition(".")[0])
        if extent is None or not _holds_at(extent, same, graphs):
            raise CaptureError(
                f"how the shape of {first.name}, which {first.producer or 'the batch'} makes, "
                "follows from the sizes that vary is not known: leave out of dynamic what it "
                "depends on"
            )
        found[first.name] = extent
    return found


def _holds_at(extent: Extent, values: Sequence[Value], graphs: Sequence[Evaluated]) -> bool:
    return all(
        tuple(evaluated(text, sizes) for text in extent.shape) == value.shape
        and evaluated(extent.size_bytes, sizes) == value.size_bytes
        for value, (sizes, _) in zip(values, graphs, strict=True)
    )


def _is_constant(extent: Extent) -> bool:
    return all(text.isdigit() for text in (*extent.shape, extent.size_bytes))


def _traced_values(gm: fx.GraphModule, env: Environment) -> Iterator[tuple[str, Extent]]:
    """Extents by the names that values of each node may have."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        several = isinstance(value, (tuple, list))
        for i, tensor in enumerate(tensors_of(node)):
            if isinstance(tensor, Tensor):
                yield (f"{node.name}.{i}" if several else node.name), _extent(node, tensor, env)


def _extent(node: fx.Node, tensor: Tensor, env: Environment) -> Extent:
    shape = tuple(env.text(n) for n in tensor.shape)
    size_bytes: Any = result_bytes(node, tensor)
    if is_tangent(node):  # see `Values.add_tangents`
        size_bytes = tensor.numel() * tensor.element_size()
    return Extent(shape, env.text(size_bytes))
