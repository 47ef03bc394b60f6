"""Measuring the links between ranks: all ranks of a group gather together, in one order.

This is the only place where a collective is timed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from remat.graph_capture.devices.device_links import links_between_ranks
from remat.graph_capture.devices.link_speeds import fitted
from remat.graph_capture.devices.rank_links import RankLinks

SIZES = tuple(1 << shift for shift in (14, 16, 18, 20, 22, 24))
"""Bytes of the gathered whole: 16 KiB to 16 MiB."""
RUNS = 9
WARM = 2
"""Runs before, in which connections are made."""


def measured_rank_links(group: dist.ProcessGroup, device: str, title: str) -> RankLinks:
    """The links between the ranks of a group, which must all call; the slowest rank counts.

    They are taken to be inside of one node, and those between nodes as the table has them.

    Parameters
    ----------
    device : that the ranks compute on. title : of the machine.
    """
    n = group.size()
    moved_us = {size * (n - 1) // n: _gather_us(group, device, size) for size in SIZES}
    gb_s, latency_us = fitted(moved_us)
    return msgspec.structs.replace(
        links_between_ranks(device, title),
        inside_gb_s=gb_s,
        inside_us=latency_us,
        node_size=n,
        source=f"in a node measured over {n} ranks by {dist.get_backend(group)} on {title}",
    )


def _gather_us(group: dist.ProcessGroup, device: str, size_bytes: int) -> float:
    own = torch.zeros(size_bytes // group.size(), dtype=torch.uint8, device=device)
    whole = torch.empty(len(own) * group.size(), dtype=torch.uint8, device=device)
    times = [_timed_us(group, whole, own) for _ in range(WARM + RUNS)][WARM:]
    median = torch.tensor([statistics.median(times)], dtype=torch.float32, device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX, group)
    return float(median)


def _timed_us(group: dist.ProcessGroup, whole: Tensor, own: Tensor) -> float:
    dist.barrier(group)
    _settle(own)
    start = time.perf_counter()
    # Torch 2.13 has another name for it, which older releases lack.
    named: Any = dist
    gather = getattr(named, "all_gather_single", None) or named.all_gather_into_tensor
    gather(whole, own, group)
    _settle(own)
    return 1e6 * (time.perf_counter() - start)


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
