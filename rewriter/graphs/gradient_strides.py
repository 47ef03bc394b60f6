"""Backward takes the gradients of the results in the strides that they come in, as eager does.

``out.sum()`` sends back one number that stands for all, ``loss(out.transpose(1, 2))`` a gradient in
another order. AOTAutograd copies such a gradient into the strides that it has traced. A kernel that
sums, as batch norm's does, adds a copy's elements in another order than eager the gradient's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import (
    MemoryFormatMeta,
    PlainTensorMeta,
    ViewAndMutationMeta,
)
from torch._prims_common import suggest_memory_format

from remat.graph_capture.joint.nodes import is_tangent, tensors_of

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_OWN_STRIDES = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
"""Their results have the same strides whatever those of their arguments are."""
_READ_MEMORY = (
    aten.as_strided.default,
    aten.as_strided_scatter.default,
    aten._reshape_alias.default,
    aten.view.dtype,
)
"""They read memory as the trace saw it laid out."""
_COPIED: dict[Any, tuple[int, int | None]] = {
    aten.native_group_norm_backward.default: (0, 1),
    aten.cudnn_batch_norm_backward.default: (1, 0),
    aten._cdist_backward.default: (0, None),
    aten._weight_norm_interface_backward.default: (0, None),
    aten.view_as_complex.default: (0, None),
    aten.view_as_real.default: (0, None),
}
"""Where autograd's formula calls ``contiguous`` on the gradient, which a trace of a contiguous one
does not show: the gradient's argument, and that of the input whose memory format is asked for.
Of torch's ``derivatives.yaml``."""


def take_as_they_come(metadata: ViewAndMutationMeta, backward: fx.Graph) -> None:
    """Let backward have gradients as they come, if it can read them in any strides.

    Where the trace has a view of a gradient, eager has a reshape, which copies what no view shows.
    Where autograd's formula asks for a contiguous gradient, so does backward.

    Parameters
    ----------
    metadata : AOTAutograd's, from which it makes the step. backward : the graph, changed in place.
    """
    reached = _reached(backward)
    if any(node.target in _READ_MEMORY for node in reached):
        return
    for node in reached:
        if node.target in _RESHAPES:
            node.target = aten.reshape.default
        elif node.target in _COPIED:
            _make_contiguous(node, *_COPIED[node.target])
    for fact in metadata.subclass_tangent_meta or ():
        if isinstance(fact, PlainTensorMeta):
            fact.memory_format = MemoryFormatMeta(size=_any, stride=_any)


def _reached(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose strides may depend on those of a gradient of more than one element."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if is_tangent(node) and any(t is not None and t.numel() > 1 for t in tensors_of(node)):
                reached.add(node)
        elif node.target not in _OWN_STRIDES and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def _make_contiguous(node: fx.Node, gradient: int, like: int | None) -> None:
    read = node.args[gradient]
    assert isinstance(read, fx.Node)
    layout = torch.contiguous_format
    if like is not None and _takes_format(node):
        source = node.args[like]
        assert isinstance(source, fx.Node)
        layout = suggest_memory_format(source.meta["val"])
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.contiguous.default, (read,), {"memory_format": layout})
    copy.meta = dict(read.meta)
    node.update_arg(gradient, copy)


def _takes_format(node: fx.Node) -> bool:
    """Group norm asks for its input's memory format on a CPU alone."""
    read: Any = node.args[0]
    is_group_norm = node.target is aten.native_group_norm_backward.default
    return not is_group_norm or read.meta["val"].device.type == "cpu"


class _Anything:
    """What is equal to all sizes and strides."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # pyright: ignore[reportAssignmentType]


_any: Any = _Anything()
