"""Costs of collectives: each by its traffic, over links of a profile, else of the device table."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, fx

from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.devices.known_devices import MODELLED, links_between_ranks
from remat.graph_capture.devices.links import Collective, RankLinks, Traffic, fitted
from remat.graph_capture.distributed.collectives import is_collective, members_of, op_name
from remat.graph_capture.distributed.sharding import is_ring
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.joint.nodes import tensors_of

_KINDS: dict[str, Collective] = {  # by how the names of ops begin; all others send
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}


def traffic_of(node: fx.Node, node_size: int) -> Traffic:
    """What a collective moves; `node_size`: ranks of a node of the cluster."""
    ranks = members_of(node)
    here = max(Counter(rank // node_size for rank in ranks).values())  # the most in one node
    read_bytes = sum(_tensor_bytes(source) for source in node.all_input_nodes)
    whole_bytes = max(read_bytes, _tensor_bytes(node))  # gathers return the whole, scatters read it
    name = op_name(node)
    kinds: list[Collective] = [kind for begin, kind in _KINDS.items() if name.startswith(begin)]
    # By `permute_tensor` each rank gives all that it has to one other.
    parts = node.args[2] if kinds == ["all_to_all"] and len(node.args) > 3 else None
    is_to_one = isinstance(parts, (list, tuple)) and len([n for n in parts if n != 0]) <= 1
    return Traffic(kinds[0] if kinds and not is_to_one else "send", whole_bytes, len(ranks), here)


def _tensor_bytes(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node) if t is not None)


RANKS_OF_NODE = "LOCAL_WORLD_SIZE"  # the variable in which torchrun says how many ranks a node has


def with_collective_costs(
    graph: TrainingGraph, node_of_op: Mapping[str, fx.Node], links: RankLinks
) -> TrainingGraph:
    nodes = {name: node for name, node in node_of_op.items() if is_collective(node)}
    if not nodes:
        return graph

    def costed(op: Op) -> Op:
        if op.name not in nodes:
            return op
        if is_ring(op.target):
            return _ring_costed(op, nodes[op.name], links)
        cost_us = links.collective_us(traffic_of(nodes[op.name], links.node_size))
        return replace(op, cost_us=cost_us, cost_origin=MODELLED)

    return replace(
        graph, ops=tuple(map(costed, graph.ops)),
        cost_origin=graph.cost_origin if graph.cost_origin == MODELLED else "mixed",
        notes=(*graph.notes, f"{len(nodes)} collectives are modelled: {links}"),
    )  # fmt: skip


def _ring_costed(op: Op, node: fx.Node, links: RankLinks) -> Op:
    """Keys and values go on to the next rank while a round computes."""
    from remat.graph_capture.distributed.ring_attention import ring_traffic  # which few steps have

    found, around = ring_traffic(node), traffic_of(node, links.node_size)
    a_round = replace(around, kind="send", whole_bytes=found.round_bytes)
    sent_us = found.rounds * links.collective_us(a_round)
    return replace(
        op, cost_us=links.both_us(op.cost_us, sent_us), cost_origin=MODELLED,
        workspace_bytes=max(op.workspace_bytes, found.held_bytes),
    )  # fmt: skip


def links_of_step(device: str, title: str, profile: Profile | None = None) -> RankLinks:
    """In nodes as torchrun says; `device` may be of the table, `title` is of this machine."""
    found = (profile and profile.ranks) or links_between_ranks(device, title)
    return replace(found, node_size=int(os.environ.get(RANKS_OF_NODE, found.node_size)))


# This is the only place where a collective is timed.

_SIZES = tuple(1 << shift for shift in (14, 16, 18, 20, 22, 24))
"""Bytes of the gathered whole: 16 KiB to 16 MiB."""
_RUNS = 9
_WARM = 2  # runs before, in which connections are made


def measured_rank_links(group: dist.ProcessGroup, device: str, title: str) -> RankLinks:
    """The links between the ranks of a group, which must all call."""
    n = group.size()
    # A rank receives all parts but its own.
    moved_us = {size * (n - 1) // n: _gather_us(group, device, size) for size in _SIZES}
    gb_s, latency_us = fitted(moved_us)
    return replace(  # ranks are taken to be in one node; the links between nodes stay the table's
        links_between_ranks(device, title), inside_gb_s=gb_s, inside_us=latency_us, node_size=n,
        source=f"in a node measured over {n} ranks by {dist.get_backend(group)} on {title}",
    )  # fmt: skip


def _gather_us(group: dist.ProcessGroup, device: str, size_bytes: int) -> float:
    own = torch.zeros(size_bytes // group.size(), dtype=torch.uint8, device=device)
    whole = torch.empty(len(own) * group.size(), dtype=torch.uint8, device=device)
    times = [_timed_us(group, whole, own) for _ in range(_WARM + _RUNS)][_WARM:]
    median = torch.tensor([statistics.median(times)], dtype=torch.float32, device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX, group)  # the slowest rank counts
    return float(median)


def _timed_us(group: dist.ProcessGroup, whole: Tensor, own: Tensor) -> float:
    dist.barrier(group)  # together, or a rank would time its wait for another that comes later
    _settle(own)
    start = time.perf_counter()
    named: Any = dist  # torch 2.13 has another name for it, which older releases lack
    gather = getattr(named, "all_gather_single", None) or named.all_gather_into_tensor
    gather(whole, own, group)
    _settle(own)
    return 1e6 * (time.perf_counter() - start)


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
