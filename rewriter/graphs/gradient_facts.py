"""What guards must know about the gradients of a step, read off the joint graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import is_tangent, written_inputs
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.over_ranks.dtensors import is_beside_local_part

_SUM = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class GradientFacts:
    """Gradients of a step, by the places of its inputs: parameters and buffers first.

    Attributes
    ----------
    unused : places of inputs that get no gradient, though they may require one.
    needs : for each place that gets one, the places of the results of forward that it comes from.
    through : all places in `needs`' values.
    summed : places whose gradient is a sum of several terms.
    written : places of the inputs that it writes to, with the paths of those that are parameters
        or buffers; empty for what else it writes to.
    """

    unused: frozenset[int]
    needs: dict[int, frozenset[int]]
    through: frozenset[int]
    summed: tuple[int, ...]
    written: dict[int, str]

    @property
    def overwrites(self) -> bool:
        """Whether the step writes to a buffer or an input."""
        return bool(self.written)

    @property
    def writes_batch(self) -> bool:
        """Whether it writes to what is neither a parameter nor a buffer."""
        return "" in self.written.values()


def gradient_facts(joint: Joint) -> GradientFacts:
    """The facts of a joint graph."""
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
    """The path of a parameter or a buffer; empty for what is neither."""
    # Told by the name, as torch's classes of descriptions move between releases.
    is_state = type(description).__name__ in ("ParamAOTInput", "BufferAOTInput")
    return path_in_model(str(getattr(description, "target", ""))) if is_state else ""


def _reached_from(graph: fx.Graph, forward: list[object]) -> dict[fx.Node, frozenset[int]]:
    """For each node that depends on tangents: the places of the results that these belong to."""
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
    while node.name not in joint.node_of_op and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target is _SUM and all(a in reached for a in node.all_input_nodes)
