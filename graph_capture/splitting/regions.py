"""The regions of a traced step that may run in pieces, before they have prices."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx

from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.nodes import Places, copy_of
from remat.graph_capture.splitting.heads import Head, find_heads
from remat.graph_capture.splitting.replaced import replace_head
from remat.graph_capture.tracing.one_trace import Trace

COUNTS = (2, 4, 8, 16)
"""Numbers of pieces that are priced."""
HELD, LARGE_BYTES, LARGE_PART = 3, 1 << 20, 1 / 50
"""By default a head is taken if so many tensors of its logits' size, which its backward holds, take
so many bytes, and so large a part of what the step keeps resident and forward makes. The part is
low: where most is computed again, what is left of a step is a fraction of that."""
AND = ", "
"""Between the names of heads, which run in the same number of pieces."""


@dataclass(frozen=True)
class Found:
    """The heads of a step, and the ops that would run in their place.

    Attributes
    ----------
    heads : in the captured joint graph. joint : a copy of it, with every head in pieces.
    nodes : for each head, the ops of ours in that copy.
    is_exact : whether they give eager's bits.
    dropped : names of captured ops that the copy has not, or has otherwise.
    added : ops of the copy that the captured graph has not, each after the name of the op before
        which it stands; empty for the end.
    is_asked : whether the user named the split. What stays whole then is warned of.
    """

    heads: tuple[Head, ...]
    joint: Joint
    nodes: tuple[tuple[fx.Node, ...], ...]
    is_exact: bool
    dropped: tuple[str, ...]
    added: tuple[tuple[str, Op], ...]
    is_asked: bool

    @property
    def name(self) -> str:
        """The name of the region: those of the heads."""
        return AND.join(head.softmax.name for head in self.heads)

    @property
    def pieces(self) -> int:
        """The number of pieces that the ops are set to."""
        return cast("int", self.nodes[0][0].args[-1])

    def set_pieces(self, pieces: int) -> None:
        """Set the number of pieces that the ops run in: their last argument."""
        for node in (node for nodes in self.nodes for node in nodes):
            node.args = (*node.args[:-1], pieces)

    def by_node(self) -> Iterator[tuple[Head, fx.Node]]:
        """Each op of ours with the head that it serves."""
        for head, nodes in zip(self.heads, self.nodes, strict=True):
            for node in nodes:
                yield head, node


def regions_asked(trace: Trace) -> list[Found]:
    """The regions that the trace's recipe asks for; none where it asks for no split.

    Warns of losses that cannot run in pieces, with the reason, if the user named the split. If not,
    only large heads are taken.
    """
    asked = trace.recipe.split
    if asked == "none" or trace.recipe.pieces:
        return []
    if asked is None:
        return find_regions(trace, True, frozenset(_large_heads(trace)))
    places = Places(trace.joint.module.graph)
    for softmax, reason in find_heads(trace.joint.module.graph)[1]:
        where = " ".join(part for part in places.of(softmax) if part)
        warnings.warn(
            f"the loss of {softmax.name} ({where or trace.recipe.name}) cannot run in pieces: "
            f"{reason}. It stays whole",
            stacklevel=2,
        )
    return find_regions(trace, asked == "exact")


def _large_heads(trace: Trace) -> Iterator[str]:
    """Names of heads whose backward holds a large part of the bytes of the step."""
    graph = trace.graph
    at = graph.op_index
    of_forward = [v for v in graph.values if at.get(v.producer, -1) < graph.n_forward]
    large_bytes = max(LARGE_BYTES, LARGE_PART * sum(value.size_bytes for value in of_forward))
    for head in find_heads(trace.joint.module.graph)[0]:
        logits: Tensor = head.softmax.meta["val"]
        if HELD * logits.nbytes >= large_bytes:
            yield head.softmax.name


def find_regions(trace: Trace, is_exact: bool, names: Container[str] | None = None) -> list[Found]:
    """The heads of a trace as one region, with the ops that would run in their place.

    Parameters
    ----------
    names : of the heads that are taken; None for all.
    """

    def taken(graph: fx.Graph) -> list[Head]:
        heads = find_heads(graph)[0]
        return [head for head in heads if names is None or head.softmax.name in names]

    heads = taken(trace.joint.module.graph)
    if not heads:
        return []
    made: list[list[str]] = []

    def edit(graph: fx.Graph) -> None:
        ours = [replace_head(head, COUNTS[0], is_exact) for head in taken(graph)]
        made.extend([node.name for node in nodes] for nodes in ours)

    captured, recipe = trace.joint, trace.recipe
    gm = copy_of(captured.module, edit)
    joint = build_joint(
        gm, captured.num_forward_outputs, recipe.name, recipe.resident,
        hand_over=recipe.hand_over, **recipe.facts(),
    )  # fmt: skip
    # The copy that becomes a module has nodes of its own, under the same names.
    node_named = {node.name: node for node in gm.graph.nodes}
    nodes = tuple(tuple(node_named[name] for name in names) for names in made)
    changes = _changes(captured.graph, joint.graph)
    return [
        Found(
            tuple(heads),
            joint,
            nodes,
            is_exact,
            *changes,
            recipe.split is not None,
        )
    ]


def _changes(
    before: TrainingGraph, after: TrainingGraph
) -> tuple[tuple[str, ...], tuple[tuple[str, Op], ...]]:
    """What to drop from `before` and what to add so that it becomes `after`."""
    index, last = before.op_index, -1
    added: list[tuple[str, Op]] = []
    waiting: list[Op] = []
    same: set[str] = set()
    for op in after.ops:
        at = index.get(op.name, -1)
        if at > last and before.ops[at] == op:
            added += [(op.name, one) for one in waiting]
            waiting, last = [], at
            same.add(op.name)
        else:
            waiting.append(op)
    added += [("", one) for one in waiting]
    return tuple(op.name for op in before.ops if op.name not in same), tuple(added)
