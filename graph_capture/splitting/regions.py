"""The regions of a traced step that may run in pieces, before they have prices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.nodes import Places, copy_of
from remat.graph_capture.splitting.heads import Head, find_heads
from remat.graph_capture.splitting.replaced import replace_head
from remat.graph_capture.tracing.trace import Trace

COUNTS = (2, 4, 8, 16)
"""Numbers of pieces that are priced."""


@dataclass(frozen=True)
class Found:
    """One head, and the ops that would run in its place.

    Attributes
    ----------
    head : in the captured joint graph. joint : a copy of it, with every head in pieces.
    nodes : the ops of ours in that copy. is_exact : whether they give eager's bits.
    ops : names of those that they replace. places : for each of ours, the op whose place it takes.
    captured_hash : of the captured graph.
    """

    head: Head
    joint: Joint
    nodes: tuple[fx.Node, ...]
    is_exact: bool
    ops: tuple[str, ...]
    places: dict[str, str]
    captured_hash: str

    @property
    def pieces(self) -> int:
        """The number of pieces that the ops are set to."""
        return int(self.nodes[0].args[-1])  # pyright: ignore

    @property
    def name(self) -> str:
        """The name of the region."""
        return self.head.softmax.name


def regions_asked(trace: Trace) -> list[Found]:
    """The regions that the trace's recipe asks for; none where it asks for no split.

    Warns of losses that cannot run in pieces, with the reason.
    """
    asked = trace.recipe.split
    if asked == "none" or trace.recipe.pieces:
        return []
    places = Places(trace.joint.module.graph)
    for softmax, reason in find_heads(trace.joint.module.graph)[1]:
        where = " ".join(part for part in places.of(softmax) if part)
        warnings.warn(
            f"the loss of {softmax.name} ({where or trace.recipe.name}) cannot run in pieces: "
            f"{reason}. It stays whole",
            stacklevel=2,
        )
    return find_regions(trace, asked == "exact")


def find_regions(trace: Trace, is_exact: bool) -> list[Found]:
    """The heads of a trace, each with the ops that would run in its place."""
    heads, _ = find_heads(trace.joint.module.graph)
    if not heads:
        return []
    made: dict[str, list[fx.Node]] = {}

    def edit(graph: fx.Graph) -> None:
        for head in find_heads(graph)[0]:
            made[head.softmax.name] = replace_head(head, COUNTS[0], is_exact)

    captured = trace.joint
    gm = copy_of(captured.module, edit)
    # The copy that becomes a module has nodes of its own, under the same names.
    node_named = {node.name: node for node in gm.graph.nodes}
    facts, recipe = trace.recipe.facts(), trace.recipe
    joint = build_joint(
        gm, captured.num_forward_outputs, recipe.name, recipe.resident,
        hand_over=recipe.hand_over, **facts,
    )  # fmt: skip
    return [
        _found(head, joint, [node_named[node.name] for node in made[head.softmax.name]], captured)
        for head in heads
    ]


def set_pieces(nodes: Sequence[fx.Node], pieces: int) -> None:
    """Set the number of pieces that nodes of ours run in: their last argument."""
    for node in nodes:
        node.args = (*node.args[:-1], pieces)


def _found(head: Head, joint: Joint, nodes: list[fx.Node], captured: Joint) -> Found:
    names = {node.name for node in (*head.forward, *head.backward)}
    ops = tuple(op.name for op in captured.graph.ops if op.name in names)
    forward, *backward = nodes
    places = {forward.name: head.loss.name}
    order = captured.graph.op_index
    for node in backward:
        results = {node.name, *(user.name for user in node.users)} & set(order)
        places[node.name] = min(results, key=order.__getitem__)
    is_exact = len(backward) == sum(one is not None for one in (head.of_x, head.of_weight))
    return Found(head, joint, tuple(nodes), is_exact, ops, places, captured.graph.hash)
