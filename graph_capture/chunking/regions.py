"""The regions of a traced step that may run in chunks, before they have costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace
from torch import Tensor, fx

from remat.graph_capture.chunking.blocks import largest_block
from remat.graph_capture.chunking.head import Head, find_heads
from remat.graph_capture.chunking.head_ops import (
    FORWARD,
    SMOOTHED,
    WEIGHT,
    cuts_classes_out_of_rows,
)
from remat.graph_capture.chunking.mlp import Mlp
from remat.graph_capture.chunking.mlp_ops import MLP, MLP_GATED_INPUT, MLP_INPUT, MLP_WEIGHTS
from remat.graph_capture.chunking.replace import HeadOrMlp, find_parts, replace_part, results_of
from remat.graph_capture.eager_step import changes_between
from remat.graph_capture.errors import option
from remat.graph_capture.graph import Choice, Op, PartKind, Region, TrainingGraph, Value
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.nodes import NodeOrigins, copy_of
from remat.graph_capture.tracing.traced_step import Trace

COUNTS = (2, 4, 8, 16)  # numbers of chunks that are costed
# Tensors of the logits' size that a head's backward holds. A head is taken by default if they are
# so many bytes, and so large a part of the step: low, as recomputing leaves a fraction of that.
_HELD, _LARGE_BYTES, _LARGE_PART = 3, 1 << 20, 1 / 50
AND = ", "  # between the names of parts, which run in the same number of chunks


@dataclass(frozen=True)
class RegionCandidate:
    parts: tuple[HeadOrMlp, ...]  # in the captured joint graph
    joint: Joint  # a copy of it, with every part in chunks
    nodes: tuple[tuple[fx.Node, ...], ...]  # for each part, the ops of ours in that copy
    is_exact: bool  # the ops are to give eager's bits
    dropped: tuple[str, ...]  # names of captured ops that the copy has not, or has otherwise
    added: tuple[tuple[str, Op], ...]  # that only the copy has: name of the op that follows, op
    is_asked: bool  # the user named the split, and is warned of a head that stays whole

    @property
    def name(self) -> str:
        return AND.join(part.name for part in self.parts)

    @property
    def kinds(self) -> tuple[PartKind, ...]:
        kinds: list[PartKind] = ["head" if isinstance(one, Head) else "mlp" for one in self.parts]
        return tuple(dict.fromkeys(kinds))

    @property
    def chunks(self) -> int:
        return cast("int", self.nodes[0][0].args[-1])  # all ops of ours take it last

    def set_chunks(self, chunks: int) -> RegionCandidate:
        for node in (node for nodes in self.nodes for node in nodes):
            node.args = (*node.args[:-1], chunks)
        return self

    def by_node(self) -> Iterator[tuple[HeadOrMlp, fx.Node]]:
        for part, nodes in zip(self.parts, self.nodes, strict=True):
            for node in nodes:
                yield part, node


def requested_heads(trace: Trace) -> list[RegionCandidate]:
    """Those that the recipe asks for, where MLPs stay whole: beside blocks, and over a range."""
    return [one for one in requested_regions(trace) if one.kinds == ("head",)]


def requested_regions(trace: Trace) -> list[RegionCandidate]:
    """The regions that the recipe asks for, of which a plan takes one: heads, MLPs, or both."""
    asked = trace.recipe.split
    if asked == "none" or trace.recipe.edits:
        return []
    parts = find_parts(trace.joint.module.graph)
    heads, least_bytes = [one for one in parts if isinstance(one, Head)], 0
    if asked is None:
        heads, least_bytes = _large(trace, heads), _LARGE_BYTES  # nobody asked: only what pays
    else:
        places = NodeOrigins(trace.joint.module.graph)
        for softmax, reason in find_heads(trace.joint.module.graph)[1]:
            where = " ".join(filter(None, places.of(softmax)))
            warnings.warn(
                f"the loss of {softmax.name} ({where or trace.recipe.name}) stays whole. It "
                f"cannot run in chunks: {reason}",
                stacklevel=2,
            )
    mlps = [one for one in _that_set_the_peak(trace, parts) if one.transient_bytes >= least_bytes]
    # Both together would be the same parts once more where there are only some of one kind.
    taken = [heads, mlps, [*heads, *mlps]] if heads and mlps else [heads or mlps]
    return [_found(trace, asked != "tolerance", group) for group in taken if group]


def _large(trace: Trace, heads: Iterable[Head]) -> list[Head]:
    graph, at = trace.graph, trace.graph.op_index
    of_forward = [v for v in graph.values if at.get(v.producer, -1) < graph.n_forward]
    large_bytes = max(_LARGE_BYTES, _LARGE_PART * sum(value.size_bytes for value in of_forward))
    return [one for one in heads if _HELD * one.softmax.meta["val"].nbytes >= large_bytes]


def _that_set_the_peak(trace: Trace, parts: Sequence[HeadOrMlp]) -> list[Mlp]:
    """MLPs that hold as much as any op beside them and the heads."""
    graph = trace.graph
    mlps = [one for one in parts if isinstance(one, Mlp)]
    own = {node.name for one in parts for node in (*one.forward, *one.backward)}
    size = {value.name: value.size_bytes for value in graph.values if value.producer}

    def held_bytes(op: Op) -> int:
        return op.workspace_bytes + sum(size.get(name, 0) for name in {*op.inputs, *op.outputs})

    # Where another op holds more, chunks of an MLP lower no peak.
    most_bytes = max((held_bytes(op) for op in graph.ops if op.name not in own), default=0)
    return [one for one in mlps if one.transient_bytes >= most_bytes]


def find_regions(
    trace: Trace, is_exact: bool, names: Container[str] | None = None
) -> list[RegionCandidate]:
    """The parts of a trace of these names, None for all, as one region."""
    parts = find_parts(trace.joint.module.graph, names)
    return [_found(trace, is_exact, parts)] if parts else []


def _found(trace: Trace, is_exact: bool, parts: Sequence[HeadOrMlp]) -> RegionCandidate:
    made: list[list[str]] = []
    names = frozenset(part.name for part in parts)

    def edit(graph: fx.Graph) -> None:
        # Found again, as `parts` name nodes of the captured graph, and this is a copy.
        ours = [replace_part(part, COUNTS[0], is_exact) for part in find_parts(graph, names)]
        made.extend([node.name for node in nodes] for nodes in ours)

    captured, recipe = trace.joint, trace.recipe
    gm = copy_of(captured.module, edit)
    joint = build_joint(
        gm, captured.num_forward_outputs, recipe.name, recipe.resident,
        gradient_release=recipe.gradient_release, **recipe.facts(),
    )  # fmt: skip
    node_named = {node.name: node for node in gm.graph.nodes}  # of the copy that becomes the module
    nodes = tuple(tuple(node_named[name] for name in own) for own in made)
    changes = changes_between(captured.graph, joint.graph)
    return RegionCandidate(tuple(parts), joint, nodes, is_exact, *changes, recipe.split is not None)


# What our ops do in place of captured ones, for costs on a device that is not here.

# Blocks of hidden tensors that an op has live: in forward what goes into the function and its
# result; in backward what went into it and two gradients.
_BLOCKS: dict[Any, int] = {MLP: 2, MLP_INPUT: 3, MLP_WEIGHTS: 3}
_BLOCKS_GATED: dict[Any, int] = {MLP: 3, MLP_GATED_INPUT: 4, MLP_WEIGHTS: 5}
"""The same with a gate: what up returns is one more, and the product's gradient another."""


def _captured_ops(part: HeadOrMlp, node: fx.Node, chunks: int) -> list[fx.Node]:
    """The nodes whose work an op of ours does; backward makes what is hidden again."""
    if isinstance(part, Head):
        return _nodes_of_head(part, node, chunks)
    if node.target is MLP:
        return part.forward
    own = [one for one in results_of(part, node.target) if one is not None]
    hidden = [one for one in (*part.forward, *part.backward) if one not in part.ends]
    return [*hidden, *own]


def _workspace_bytes(part: HeadOrMlp, node: fx.Node, chunks: int) -> int:
    if isinstance(part, Mlp):
        value: Tensor = part.gate.product.meta["val"]
        n_blocks = (_BLOCKS if part.up is None else _BLOCKS_GATED)[node.target]
        return n_blocks * -(-value.nbytes // chunks)
    # Backward: three blocks in the loss's dtype, the logarithms of probabilities, their gradient
    # and the logits'. A block of classes cut out of rows is one more.
    value, of_x = part.softmax.meta["val"], part.product.meta["val"]
    n_rows, n_classes = value.shape
    block = max(-(-value.numel() // chunks), largest_block(n_rows, chunks) * n_classes)
    blocks_bytes = 3 * block * value.element_size()
    if not _is_cut_out_of_rows(part, node):
        return blocks_bytes
    return blocks_bytes + -(-of_x.numel() // chunks) * of_x.element_size()


def _nodes_of_head(head: Head, node: fx.Node, chunks: int) -> list[fx.Node]:
    if node.target in (FORWARD, SMOOTHED):
        return head.forward
    ends = (head.of_x, head.of_weight, head.of_bias)
    made = {node.name, *(user.name for user in node.users)}
    own = [one for one in ends if one is not None and one.name in made]
    logits = [one for one in head.forward if one is not head.loss]
    shared = [one for one in head.backward if one not in ends]
    # Blocks of classes that are cut out of rows make the logits anew for each.
    return [*(logits + shared) * (chunks if _is_cut_out_of_rows(head, node) else 1), *own]


def _is_cut_out_of_rows(head: Head, node: fx.Node) -> bool:
    dtype = head.softmax.meta["val"].dtype
    return node.target is WEIGHT and cuts_classes_out_of_rows(dtype, head.smoothing)


# Costs of what may run in chunks: measured if the device is here, else of the captured ops.

ChunkCosts = Callable[[RegionCandidate], tuple[Mapping[str, Op], Sequence[Value]]]
"""From a region in chunks: its ops of ours by name, and the values of the graph with them."""
_HEADS = ("head",)
IsExact = Callable[[RegionCandidate], bool]  # in the chunks that they are set to


def with_regions(
    graph: TrainingGraph, found: Sequence[RegionCandidate], chunk_costs: ChunkCosts,
    is_exact: IsExact,
) -> TrainingGraph:  # fmt: skip
    """`graph` with the regions found and their choices; without choices a region is none."""
    regions = [_region(graph, one, chunk_costs, is_exact) for one in found]
    for one, region in zip(found, regions, strict=True):
        if one.is_asked and not region.choices and one.kinds == _HEADS:
            warnings.warn(
                f"the loss of {one.name} ({graph.name}) stays whole: in chunks its bits would "
                f"differ from eager's here. Allow that with {option('split', 'tolerance')}",
                stacklevel=2,
            )
    return replace(graph, regions=tuple(one for one in regions if one.choices))


def _region(
    graph: TrainingGraph, found: RegionCandidate, chunk_costs: ChunkCosts, is_exact: IsExact
) -> Region:
    choices: list[Choice] = []
    for chunks in COUNTS:
        found.set_chunks(chunks)
        if not found.is_exact or is_exact(found):  # numbers that do not give eager's bits go
            ours, values = chunk_costs(found)
            least_us = _whole_us(graph, found)  # it seems quicker only where blocks fit into caches
            if found.is_exact and sum(op.cost_us for op in ours.values()) < least_us:
                ours = _taking(least_us, ours)
            ops = [
                (place, ours.get(op.name) or _as_captured(graph, op)) for place, op in found.added
            ]
            made = {name for _, op in ops for name in op.outputs}
            own = tuple(value for value in values if value.name in made)
            choices.append(Choice(found.chunks, found.is_exact, tuple(ops), own))
    return Region(found.name, found.dropped, tuple(choices), found.kinds)


def _whole_us(graph: TrainingGraph, found: RegionCandidate) -> float:
    dropped = set(found.dropped)
    return sum(op.cost_us for op in graph.ops if op.name in dropped)


def _taking(all_us: float, ours: Mapping[str, Op]) -> Mapping[str, Op]:
    factor = all_us / sum(op.cost_us for op in ours.values())
    return {name: replace(op, cost_us=factor * op.cost_us) for name, op in ours.items()}


def _as_captured(graph: TrainingGraph, op: Op) -> Op:
    """An op that reads other values than before, such as an update, at its captured cost."""
    same = [one for one in graph.ops if one.target == op.target]
    before = next((one for one in same if one.name == op.name), same[0])  # named by the gradient
    return replace(op, cost_us=before.cost_us, cost_origin=before.cost_origin)


def modelled(
    captured: TrainingGraph, launch_us: float, rounded: Callable[[int], int]
) -> ChunkCosts:
    costs = {op.name: op.cost_us for op in captured.ops}

    def chunk_costs(found: RegionCandidate) -> tuple[Mapping[str, Op], Sequence[Value]]:
        graph, more_us = found.joint.graph, (found.chunks - 1) * launch_us

        def modelled_op(part: HeadOrMlp, node: fx.Node) -> Op:
            captured = _captured_ops(part, node, found.chunks)
            # Views and names among them run nothing.
            ran = [costs[node.name] for node in captured if node.name in costs]
            return replace(
                graph.ops[graph.op_index[node.name]],
                cost_us=sum(ran) + more_us * len(ran), cost_origin="modelled",
                workspace_bytes=rounded(_workspace_bytes(part, node, found.chunks)),
            )  # fmt: skip

        ours = {node.name: modelled_op(part, node) for part, node in found.by_node()}
        return ours, [replace(v, size_bytes=rounded(v.size_bytes)) for v in graph.values]

    return chunk_costs


def hoped(captured: TrainingGraph, rounded: Callable[[int], int]) -> ChunkCosts:
    """The least costs of all: chunks take as long as what they replace, and nothing twice."""
    modelled_ones = modelled(captured, 0.0, rounded)

    def chunk_costs(found: RegionCandidate) -> tuple[Mapping[str, Op], Sequence[Value]]:
        ours, values = modelled_ones(found)
        us = sum(op.cost_us for op in ours.values())
        return (_taking(min(us, _whole_us(captured, found)), ours) if us > 0 else ours), values

    return chunk_costs
