"""The graph of one rank's block, or of what follows all blocks, as a planner of clusters takes it.

It is traced over a fake group, priced for a device of the table, and its collectives by the links
between ranks. What is resident does not count: states are held apart. The border that a block reads
is made by an op of its own, so that it counts as saved where backward reads it.

Each collective may be computed again here: all ranks of a group follow one schedule of a block.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.utils._pytree as pytree
from torch import fx

from remat.graph_capture.cluster.chain import ChainModel
from remat.graph_capture.cluster.chain_shape import ChainShape
from remat.graph_capture.cluster.on_rank import behind_on_rank, block_on_rank, border_on_rank
from remat.graph_capture.devices.rank_links import RankLinks
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op, Resident, TrainingGraph
from remat.graph_capture.over_ranks.collectives import (
    PINNED,
    RETURNED,
    groups_of,
    is_collective,
    is_collective_target,
)
from remat.graph_capture.over_ranks.fake_group import FakeGroups
from remat.graph_capture.prices.modelled import price_modelled
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.trace import trace

BORDER = "remat.border"
"""The op that stands for the arrival of what a block reads."""


def block_graph_on_rank(
    chain: ChainModel, shape: ChainShape, tp: int, cp: int, groups: FakeGroups, device: str,
    links: RankLinks,
) -> tuple[TrainingGraph, str]:  # fmt: skip
    """The priced graph of one rank's block, and the value that is its border's gradient."""
    tp_group, cp_group = groups.group(tp), groups.group(cp, apart=tp)
    module = block_on_rank(chain, shape, tp, cp, tp_group, cp_group)
    args = (border_on_rank(shape, tp), *shape.block_args[1:])
    args, kwargs = _stored(((border_on_rank(shape, tp), *shape.block_args[1:]), shape.block_kwargs))
    traced = trace(module, args, kwargs, device=device, optimizer="none", split="none")
    border = border_value(traced)
    return _prepared(traced, groups, links, border), border_gradient(traced, border)


def behind_graph_on_rank(
    chain: ChainModel, shape: ChainShape, tp: int, groups: FakeGroups, device: str,
    links: RankLinks,
) -> TrainingGraph:  # fmt: skip
    """The priced graph of what one rank runs behind the last block, with the loss."""
    module = behind_on_rank(chain, shape, tp, groups.group(tp))
    args = _stored((chain.args, chain.kwargs, chain.target))
    traced = trace(module, args, {}, device=device, optimizer="none", split="none")
    return _prepared(traced, groups, links, "")


def _stored(batch: Any) -> Any:
    """The same with tensors on the CPU, whose memory is never touched: a trace asks for some."""

    def stored(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.empty(leaf.shape, dtype=leaf.dtype)
        return made.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(stored, batch)


def runs_split(chain: ChainModel, shape: ChainShape, tp: int, groups: FakeGroups) -> str:
    """Why one rank's block does not run over so many tensor parallel ranks; empty if it does."""
    if shape.unsplit:
        return shape.unsplit
    assert shape.border is not None
    if shape.border.dim() != 3 or shape.border.shape[1] % tp:
        return f"its border {list(shape.border.shape)} has no {tp} parts of a sequence"
    group = groups.group(tp)
    try:
        module = block_on_rank(chain, shape, tp, 1, group, group)
        border = border_on_rank(shape, tp)
        with torch.no_grad():
            made = module(border, *shape.block_args[1:], **shape.block_kwargs)
    except CaptureError as error:
        return str(error)
    except RuntimeError as error:
        return f"with a part of its heads, torch says: {str(error).splitlines()[0]}"
    return "" if made.shape == border.shape else "its result has another shape than what it reads"


def border_value(traced: Trace) -> str:
    """The value of the border: the first input that is no parameter."""
    return next(v.name for v in traced.graph.values if v.kind == "input" and not v.producer)


def border_gradient(traced: Trace, border: str) -> str:
    """The value that is the gradient of the border; empty where there is none."""
    joint = traced.joint
    nodes = joint.module.graph.find_nodes(op="placeholder")
    results: Any = joint.module.graph.output_node().args[0]
    of_inputs = results[joint.num_forward_outputs :]
    for node, gradient in zip(nodes, of_inputs, strict=False):  # behind the inputs come tangents
        if node.name == border and isinstance(gradient, fx.Node):
            return joint.value_of_node[gradient]
    return ""


def _prepared(traced: Trace, groups: FakeGroups, links: RankLinks, border: str) -> TrainingGraph:
    _refuse_other_groups(traced, groups)
    return planned_graph(price_modelled(traced, traced.recipe.device, ranks=links), border)


def planned_graph(graph: TrainingGraph, border: str) -> TrainingGraph:
    """A priced graph of one rank's part, as a planner of clusters takes it.

    Parameters
    ----------
    border : the value that the part reads, which an op in front of all others then makes; empty
        for none.
    """
    ops = tuple(map(_free_to_repeat, graph.ops))
    values = graph.values
    if border:
        ops = (Op("border", BORDER, "forward", (), (border,), pinned=BORDER), *ops)
        values = tuple(
            msgspec.structs.replace(v, producer="border") if v.name == border else v for v in values
        )
    # The gradient of a border comes from the block behind, which is done with it.
    values = tuple(
        msgspec.structs.replace(v, kind="activation") if v.kind == "tangent" else v for v in values
    )
    known = {v.name: v for v in values}
    return msgspec.structs.replace(
        graph, ops=ops, values=values, resident=Resident(), regions=(), links=None,
        outputs=tuple(name for name in graph.outputs if known[name].kind == "gradient"),
    )  # fmt: skip


def _refuse_other_groups(traced: Trace, groups: FakeGroups) -> None:
    for name, node in traced.joint.node_of_op.items():
        if is_collective(node) and not groups.has(groups_of([node])):
            raise CaptureError(
                f"a block runs the collective {name} by itself, and a plan of a cluster makes all "
                "that there are: leave it out of the model"
            )


def _free_to_repeat(op: Op) -> Op:
    if not is_collective_target(op.target):
        return op
    pinned = "" if op.pinned in (PINNED, RETURNED) else op.pinned
    return msgspec.structs.replace(op, workspace_bytes=0, pinned=pinned)
