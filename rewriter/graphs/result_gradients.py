"""Backward takes the gradients of the results in the strides that they come in, as eager does.

``out.sum()`` sends back one number that stands for all, ``loss(out.transpose(1, 2))`` a gradient in
another order. AOTAutograd copies such a gradient into the strides that it has traced. A kernel that
sums, as batch norm's does, adds a copy's elements in another order than eager the gradient's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from remat.graph_capture.distributed.dtensors import is_beside_local_part
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import aten, is_tangent, tensors_of, written_inputs
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.torch_private.aot import (
    MemoryFormatMeta,
    PlainTensorMeta,
    ViewAndMutationMeta,
)
from remat.graph_capture.torch_private.core import suggest_memory_format

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
does not show (torch's ``derivatives.yaml``): the gradient's argument, and that of the input whose
memory format is asked for.
"""


def take_as_they_come(metadata: ViewAndMutationMeta, backward: fx.Graph) -> None:
    reached = _reached(backward)
    if any(node.target in _READ_MEMORY for node in reached):
        return
    for node in reached:
        if node.target in _RESHAPES:
            # Where the trace has a view, eager has a reshape, which copies what no view shows.
            node.target = aten.reshape.default
        elif node.target in _COPIED:
            _make_contiguous(node, *_COPIED[node.target])
    for fact in metadata.subclass_tangent_meta or ():
        if isinstance(fact, PlainTensorMeta):
            # AOTAutograd copies a gradient whose strides differ from these: let them equal all.
            fact.memory_format = MemoryFormatMeta(size=_any, stride=_any)


def _reached(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose strides may depend on those of a gradient of more than one element."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            # One element is laid out in one way.
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
    read: Any = node.args[0]
    is_group_norm = node.target is aten.native_group_norm_backward.default
    # Group norm asks for its input's memory format on a CPU alone.
    return not is_group_norm or read.meta["val"].device.type == "cpu"


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # pyright: ignore[reportAssignmentType]


_any: Any = _Anything()


_SUM = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class GradientFacts:
    """Gradients of a step, by the places of its inputs: parameters and buffers first.

    Inputs in `unused` get none, though they may require one. `needs` has, for each other place, the
    places of the results of forward that its gradient comes from; `through` are all of these. A
    gradient in `summed` is a sum of several terms. `written` are inputs that the step writes to,
    with the paths of parameters and buffers, else empty.
    """

    unused: frozenset[int]
    needs: dict[int, frozenset[int]]
    through: frozenset[int]
    summed: tuple[int, ...]
    written: dict[int, str]

    @property
    def overwrites(self) -> bool:
        return bool(self.written)

    @property
    def writes_batch(self) -> bool:
        return "" in self.written.values()


def gradient_facts(joint: Joint) -> GradientFacts:
    output = joint.module.graph.find_nodes(op="output")[0]
    results, described = output.args[0], output.meta["desc"]
    assert isinstance(results, (tuple, list))
    # A DTensor is one input, and its gradient is two results: its local part and its mesh.
    gradients = [
        result
        for result, what in list(zip(results, described, strict=True))[joint.num_forward_outputs :]
        if not is_beside_local_part(what)
    ]
    forward = list(described[: joint.num_forward_outputs])
    reached = _reached_from(joint.module.graph, forward)
    given = {i: node for i, node in enumerate(gradients) if isinstance(node, fx.Node)}
    needs = {i: reached.get(node, frozenset[int]()) for i, node in given.items()}
    written = enumerate(written_inputs(joint.module.graph, joint.num_forward_outputs))
    return GradientFacts(
        unused=frozenset(range(len(gradients))).difference(given),
        needs=needs,
        through=frozenset[int]().union(*needs.values()),
        summed=tuple(i for i, node in given.items() if _is_sum(joint, node, reached)),
        written={i: _path_of_state(one) for i, one in written if one is not None},
    )


def _path_of_state(description: object) -> str:
    # Told by the name, as torch's classes of descriptions move between releases.
    is_state = type(description).__name__ in ("ParamAOTInput", "BufferAOTInput")
    return path_in_model(str(getattr(description, "target", ""))) if is_state else ""


def _reached_from(graph: fx.Graph, forward: list[object]) -> dict[fx.Node, frozenset[int]]:
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if is_tangent(node):
            found[node] = frozenset([forward.index(node.meta["desc"].output)])
        elif sources := [found[a] for a in node.all_input_nodes if a in found]:
            first = sources[0]
            same = all(source is first for source in sources)
            found[node] = first if same else first.union(*sources[1:])
    return found


def _is_sum(joint: Joint, node: fx.Node, reached: dict[fx.Node, frozenset[int]]) -> bool:
    # Views and the like, which are no ops of the plan, are looked through.
    while node.name not in joint.node_of_op and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target is _SUM and all(a in reached for a in node.all_input_nodes)


# With marks, backward is a generator. At each it releases gradients, lets go of them, and waits
# until it is asked to go on (by `rewriter/graphs/gradient_gates.py`).


Released = tuple[tuple[int, ...], list[Any]]
"""Places of gradients among the results of backward, and the gradients."""
Steps = Callable[[list[Any]], Iterator[Released]]


@has_side_effect
def release_gradients(places: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """The mark. A backward graph that is run as it stands returns all gradients at its end."""


def marks(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=release_gradients)


def places_released(graph: fx.Graph) -> tuple[tuple[int, ...], ...]:
    """For each mark the places that it releases, then those that are left to the end."""
    found = [_places(mark) for mark in marks(graph)]
    results: Any = graph.output_node().args[0]
    released = {place for places in found for place in places}
    rest = (i for i, r in enumerate(results) if isinstance(r, fx.Node) and i not in released)
    return (*found, tuple(rest))


def _places(mark: fx.Node) -> tuple[int, ...]:
    places: Any = mark.args[0]
    return tuple(places)
