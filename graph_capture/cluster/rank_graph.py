"""The graph of one rank's block, or of what follows all blocks, as a planner of clusters takes it.

It is traced over a fake group, priced for a device of the table, and its collectives by the links
between ranks. What is resident does not count: states are held apart. The border that a block reads
is made by an op of its own, so that it counts as saved where backward reads it.

Each collective may be computed again here: all ranks of a group follow one schedule of a block.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import torch
import torch.utils._pytree as pytree

from remat.graph_capture.capturing import price_for
from remat.graph_capture.cluster.chain import ChainModel
from remat.graph_capture.cluster.fake_group import FakeGroups
from remat.graph_capture.cluster.interconnect import Collective, Interconnect
from remat.graph_capture.cluster.on_rank import behind_on_rank, block_on_rank, border_on_rank
from remat.graph_capture.cluster.watching import ChainShape
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op, Resident, TrainingGraph
from remat.graph_capture.over_ranks.collectives import (
    PINNED,
    RETURNED,
    groups_of,
    is_collective,
)
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.trace import trace

BORDER = "remat.border"
"""The op that stands for the arrival of what a block reads."""


def block_graph_on_rank(
    chain: ChainModel, shape: ChainShape, tp: int, cp: int, groups: FakeGroups, device: str,
    links: Interconnect,
) -> TrainingGraph:  # fmt: skip
    """The priced graph of one rank's block."""
    tp_group, cp_group = groups.group("tp", tp), groups.group("cp", cp)
    module = block_on_rank(chain, shape, tp, cp, tp_group, cp_group)
    args = (border_on_rank(shape, tp), *shape.block_args[1:])
    args, kwargs = _stored(((border_on_rank(shape, tp), *shape.block_args[1:]), shape.block_kwargs))
    traced = trace(module, args, kwargs, device=device, optimizer="none", split="none")
    return _prepared(traced, groups, links, tp, _first_input(traced))


def behind_graph_on_rank(
    chain: ChainModel, shape: ChainShape, tp: int, groups: FakeGroups, device: str,
    links: Interconnect,
) -> TrainingGraph:  # fmt: skip
    """The priced graph of what one rank runs behind the last block, with the loss."""
    module = behind_on_rank(chain, shape, tp, groups.group("tp", tp))
    args = _stored((chain.args, chain.kwargs, chain.target))
    traced = trace(module, args, {}, device=device, optimizer="none", split="none")
    return _prepared(traced, groups, links, tp, "")


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
    group = groups.group("tp", tp)
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


def _first_input(traced: Trace) -> str:
    """The value of the border: the first input that is no parameter."""
    return next(v.name for v in traced.graph.values if v.kind == "input" and not v.producer)


def _prepared(
    traced: Trace, groups: FakeGroups, links: Interconnect, tp: int, border: str
) -> TrainingGraph:
    graph = price_for(traced)
    ops = tuple(_over_links(op, traced, graph, groups, links, tp) for op in graph.ops)
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


def _over_links(
    op: Op, traced: Trace, graph: TrainingGraph, groups: FakeGroups, links: Interconnect, tp: int
) -> Op:
    node = traced.joint.node_of_op.get(op.name)
    if node is None or not is_collective(node):
        return op
    kind, ranks = groups.names()[cast("str", groups_of([node])[0])]
    name = _collective_of(op)
    sizes = [graph.value_by_name[v].size_bytes for v in op.outputs]
    whole = max(sizes, default=0) * (ranks if name == "reduce_scatter" else 1)
    cost_us = links.us(name, whole, ranks, apart=tp if kind == "cp" else 1)
    pinned = "" if op.pinned in (PINNED, RETURNED) else op.pinned
    return msgspec.structs.replace(op, cost_us=cost_us, workspace_bytes=0, pinned=pinned)


def _collective_of(op: Op) -> Collective:
    kinds: dict[str, Collective] = {
        "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"
    }  # fmt: skip
    for part, kind in kinds.items():
        if part in op.target:
            return kind
    raise CaptureError(f"a block runs {op.target}, whose time over links is not known")
