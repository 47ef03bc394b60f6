"""What a collective moves: its kind, its bytes, and the ranks and nodes that take part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import fx

from remat.graph_capture.devices.rank_links import Collective, Traffic
from remat.graph_capture.joint.nodes import tensors_of
from remat.graph_capture.over_ranks.collectives import groups_of, op_name

_KINDS: dict[str, Collective] = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
"""By how the names of ops begin; all others send."""


def traffic_of(node: fx.Node, node_size: int) -> Traffic:
    """What a node of a graph moves that is a collective.

    Parameters
    ----------
    node_size : ranks of a node of the cluster.
    """
    ranks = members_of(node)
    here = max(Counter(rank // node_size for rank in ranks).values())
    read_bytes = sum(_tensor_bytes(source) for source in node.all_input_nodes)
    whole_bytes = max(read_bytes, _tensor_bytes(node))
    return Traffic(_collective_of(node), whole_bytes, len(ranks), here)


def _collective_of(node: fx.Node) -> Collective:
    name = op_name(node)
    kinds: list[Collective] = [kind for begin, kind in _KINDS.items() if name.startswith(begin)]
    # By `permute_tensor` each rank gives all that it has to one other.
    parts = node.args[2] if kinds == ["all_to_all"] and len(node.args) > 3 else None
    is_to_one = isinstance(parts, (list, tuple)) and len([n for n in parts if n != 0]) <= 1
    return kinds[0] if kinds and not is_to_one else "send"


def members_of(node: fx.Node) -> Sequence[int]:
    """The ranks of its group, by their numbers among all; this one alone if it names no group."""
    groups: tuple[Any, ...] = groups_of([node])
    named: Any = dist.distributed_c10d
    found = [
        dist.get_process_group_ranks(
            named._resolve_process_group(group) if isinstance(group, str) else group
        )
        for group in groups
    ]
    return sorted(set().union(*found)) or [0]


def _tensor_bytes(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node) if t is not None)
