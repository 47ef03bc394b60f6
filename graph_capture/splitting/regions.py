"""The regions of a traced step that may run in pieces, before they have prices."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx

from remat.graph_capture.graph import Op, PartKind, TrainingGraph
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.nodes import Places, copy_of
from remat.graph_capture.splitting.heads import Head, find_heads
from remat.graph_capture.splitting.kinds import Part, find_parts, replace_part
from remat.graph_capture.splitting.mlps import Mlp
from remat.graph_capture.tracing.one_trace import Trace

COUNTS = (2, 4, 8, 16)
"""Numbers of pieces that are priced."""
HELD, LARGE_BYTES, LARGE_PART = 3, 1 << 20, 1 / 50
"""By default a head is taken if so many tensors of its logits' size, which its backward holds, take
so many bytes, and so large a part of what the step keeps resident and forward makes. The part is
low: where most is computed again, what is left of a step is a fraction of that."""
AND = ", "
"""Between the names of parts, which run in the same number of pieces."""


@dataclass(frozen=True)
class Found:
    """Parts of a step, and the ops that would run in their place.

    Attributes
    ----------
    parts : in the captured joint graph. joint : a copy of it, with every part in pieces.
    nodes : for each part, the ops of ours in that copy.
    is_exact : whether they give eager's bits.
    dropped : names of captured ops that the copy has not, or has otherwise.
    added : ops of the copy that the captured graph has not, each after the name of the op before
        which it stands; empty for the end.
    is_asked : whether the user named the split. A head that stays whole then is warned of.
    """

    parts: tuple[Part, ...]
    joint: Joint
    nodes: tuple[tuple[fx.Node, ...], ...]
    is_exact: bool
    dropped: tuple[str, ...]
    added: tuple[tuple[str, Op], ...]
    is_asked: bool

    @property
    def name(self) -> str:
        """The name of the region: those of the parts."""
        return AND.join(part.name for part in self.parts)

    @property
    def kinds(self) -> tuple[PartKind, ...]:
        """Which kinds of parts there are."""
        kinds: dict[PartKind, None] = {}
        for one in self.parts:
            kinds["head" if isinstance(one, Head) else "mlp"] = None
        return tuple(kinds)

    @property
    def pieces(self) -> int:
        """The number of pieces that the ops are set to."""
        return cast("int", self.nodes[0][0].args[-1])

    def set_pieces(self, pieces: int) -> None:
        """Set the number of pieces that the ops run in: their last argument."""
        for node in (node for nodes in self.nodes for node in nodes):
            node.args = (*node.args[:-1], pieces)

    def by_node(self) -> Iterator[tuple[Part, fx.Node]]:
        """Each op of ours with the part that it serves."""
        for part, nodes in zip(self.parts, self.nodes, strict=True):
            for node in nodes:
                yield part, node


def regions_asked(trace: Trace) -> list[Found]:
    """The regions that the trace's recipe asks for, of which a plan takes one; or none.

    They are its heads, its MLPs and both together. Only MLPs that set the peak are taken. Of heads,
    all are if the user named the split, and only large ones if not. Losses that cannot run in
    pieces are then warned of, with the reason.
    """
    asked = trace.recipe.split
    if asked == "none" or trace.recipe.pieces:
        return []
    parts = find_parts(trace.joint.module.graph)
    heads = [one for one in parts if isinstance(one, Head)]
    mlps = [one for one in parts if isinstance(one, Mlp)]
    least_bytes = 0
    if asked is None:
        heads, least_bytes = _large(trace, heads), LARGE_BYTES
    else:
        _warn_of_whole_heads(trace)
    mlps = [one for one in _that_set_the_peak(trace, parts) if one.transient_bytes >= least_bytes]
    taken = [group for group in (heads, mlps, [*heads, *mlps]) if group]
    if not (heads and mlps):
        taken = taken[:1]
    return [_found(trace, asked != "tolerance", group) for group in taken]


def _warn_of_whole_heads(trace: Trace) -> None:
    places = Places(trace.joint.module.graph)
    for softmax, reason in find_heads(trace.joint.module.graph)[1]:
        where = " ".join(part for part in places.of(softmax) if part)
        warnings.warn(
            f"the loss of {softmax.name} ({where or trace.recipe.name}) cannot run in pieces: "
            f"{reason}. It stays whole",
            stacklevel=3,
        )


def _large(trace: Trace, heads: Iterable[Head]) -> list[Head]:
    """Heads whose backward holds a large part of the bytes of the step."""
    graph = trace.graph
    at = graph.op_index
    of_forward = [v for v in graph.values if at.get(v.producer, -1) < graph.n_forward]
    large_bytes = max(LARGE_BYTES, LARGE_PART * sum(value.size_bytes for value in of_forward))

    def held_bytes(head: Head) -> int:
        logits: Tensor = head.softmax.meta["val"]
        return HELD * logits.nbytes

    return [head for head in heads if held_bytes(head) >= large_bytes]


def _that_set_the_peak(trace: Trace, parts: Sequence[Part]) -> list[Mlp]:
    """MLPs that hold as much as any op beside them and the heads: pieces lower no other peak."""
    graph = trace.graph
    mlps = [one for one in parts if isinstance(one, Mlp)]
    own = {node.name for one in parts for node in (*one.forward, *one.backward)}
    size = {value.name: value.size_bytes for value in graph.values if value.producer}
    held = (
        op.workspace_bytes + sum(size.get(name, 0) for name in {*op.inputs, *op.outputs})
        for op in graph.ops
        if op.name not in own
    )
    most_bytes = max(held, default=0) if mlps else 0
    return [one for one in mlps if one.transient_bytes >= most_bytes]


def find_regions(trace: Trace, is_exact: bool, names: Container[str] | None = None) -> list[Found]:
    """The parts of a trace as one region, with the ops that would run in their place.

    Parameters
    ----------
    names : of the parts that are taken; None for all.
    """
    parts = find_parts(trace.joint.module.graph, names)
    return [_found(trace, is_exact, parts)] if parts else []


def _found(trace: Trace, is_exact: bool, parts: Sequence[Part]) -> Found:
    made: list[list[str]] = []
    names = frozenset(part.name for part in parts)

    def edit(graph: fx.Graph) -> None:
        ours = [replace_part(part, COUNTS[0], is_exact) for part in find_parts(graph, names)]
        made.extend([node.name for node in nodes] for nodes in ours)

    captured, recipe = trace.joint, trace.recipe
    gm = copy_of(captured.module, edit)
    joint = build_joint(
        gm, captured.num_forward_outputs, recipe.name, recipe.resident,
        hand_over=recipe.hand_over, **recipe.facts(),
    )  # fmt: skip
    # The copy that becomes a module has nodes of its own, under the same names.
    node_named = {node.name: node for node in gm.graph.nodes}
    nodes = tuple(tuple(node_named[name] for name in own) for own in made)
    changes = _changes(captured.graph, joint.graph)
    return Found(tuple(parts), joint, nodes, is_exact, *changes, recipe.split is not None)


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
