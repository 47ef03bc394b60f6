"""Names of devices: the table of `devices.json`, which names can be planned for, and rounding.

A device of the table can be planned for without owning it. The table holds what makers state, with
its source: dense peak rates, and memory in units of 10^9 bytes as sold, a little less than what a
driver shows. `Efficiency` is the share of the peaks that ops are assumed to reach.

Other names are ``cpu`` and ``cuda``, for devices of this machine. How a CUDA device rounds sizes up
stands here too, as it holds for both.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from remat.graph_capture.devices.rank_links import RankLinks
from remat.graph_capture.errors import DeviceError, option

CPU, CUDA = "cpu", "cuda"
MODELLED = "modelled"
"""What `TrainingGraph.prices` says of a graph priced for a device of the table."""
ALLOCATION_BYTES = 512
"""The CUDA caching allocator rounds every size up to a multiple of it."""
GB = 1e9
TABLE = Path(__file__).with_name("devices.json")

Allocated = Callable[[int], int]
"""From bytes that are asked for to bytes that the allocator takes."""


class Efficiency(msgspec.Struct, frozen=True):
    """Shares of the peak rate and of the peak bandwidth that a class of ops is taken to reach."""

    rate: float
    bandwidth: float


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device, as its maker states it.

    Attributes
    ----------
    title : in full. source : of its figures.
    memory_gb, bandwidth_gb_s : of its memory. link_gb_s : of the link to the host, one way.
    tflops : peak arithmetic by dtype. ``tf32`` is float32 as tensor cores may round it.
    peer_gb_s : of the links to others of a node, one way; 0 where they go by the host's.
    network_gb_s : of its own card to other nodes, one way; 0 where none is stated.
    ranks_source : of both.
    """

    title: str
    memory_gb: float
    bandwidth_gb_s: float
    link_gb_s: float
    tflops: dict[str, float]
    source: str
    peer_gb_s: float = 0.0
    network_gb_s: float = 0.0
    ranks_source: str = ""

    @property
    def memory_bytes(self) -> int:
        """All of its memory."""
        return int(self.memory_gb * GB)

    @property
    def bytes_per_us(self) -> float:
        """Peak bandwidth of its memory."""
        return self.bandwidth_gb_s * GB / 1e6

    def flops_per_us(self, dtype: str) -> float:
        """Peak arithmetic of a dtype; that of float32 where the table has none of it."""
        return self.tflops.get(dtype, self.tflops["float32"]) * 1e6


class Drive(msgspec.Struct, frozen=True):
    """A drive on NVMe, as its maker states it; `latency_us` is that of a read."""

    title: str
    write_gb_s: float
    read_gb_s: float
    latency_us: float
    source: str


class BetweenRanks(msgspec.Struct, frozen=True):
    """What collectives reach between GPUs, whatever the GPU: see `RankLinks`.

    Attributes
    ----------
    inside_share, between_share : of the rates that makers state. node_size : GPUs of a node.
    share_reason, beside_reason : how that is known.
    """

    inside_share: float
    between_share: float
    inside_us: float
    between_us: float
    hop_us: float
    share_reason: str
    beside: float
    beside_reason: str
    node_size: int


class DeviceTable(msgspec.Struct, frozen=True):
    """All devices, and what holds for each of them.

    Attributes
    ----------
    classes : efficiency by class of ops. launch_us : least time of any op.
    link_share, link_reason : share of a stated rate that copies reach, and how that is known.
    link_latency_us : of a copy to the host or back. nvme : the drive in a machine that is not here.
    between_ranks : what collectives reach. loopback : between processes of one CPU, over gloo.
    """

    classes: dict[str, Efficiency]
    launch_us: float
    link_share: float
    link_latency_us: float
    link_reason: str
    nvme: Drive
    between_ranks: BetweenRanks
    loopback: RankLinks
    devices: dict[str, Device]


@functools.cache
def device_table() -> DeviceTable:
    """The table of this release."""
    return msgspec.json.decode(TABLE.read_bytes(), type=DeviceTable)


def is_in_table(name: str) -> bool:
    """Whether a device of that name is planned for from the table."""
    return name in device_table().devices


def modelled_device(name: str) -> Device:
    """The device of that name.

    Raises
    ------
    DeviceError : there is none; names those that are near, or all.
    """
    known = device_table().devices
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose cpu, {', '.join(known)}"
    raise DeviceError(f"there is no device {name!r}: {hint}")


def table_name(title: str) -> str:
    """The name in the table of a device that its driver calls `title`; empty if it is not there.

    A driver says ``NVIDIA A100-SXM4-40GB`` or ``NVIDIA GeForce RTX 4090``. The longest name counts
    whose parts all stand there in their order.
    """
    words = re.split(r"[^a-z0-9]+", title.lower())
    shown = f" {' '.join(words)} ".replace(" rtx ", " rtx")
    names = sorted(device_table().devices, key=len, reverse=True)
    return next((name for name in names if _is_named(shown, name)), "")


def _is_named(shown: str, name: str) -> bool:
    return re.search(".*".join(rf" {part}\b" for part in name.split("-")), shown) is not None


def is_cuda(name: str) -> bool:
    """Whether `name` is of a CUDA device of this machine: ``cuda`` or ``cuda:0``."""
    return name.partition(":")[0] == CUDA


def has_cuda_allocator(name: str) -> bool:
    """Whether torch's CUDA caching allocator serves the device: all of the table are NVIDIA's."""
    return is_cuda(name) or is_in_table(name)


def check_device(name: str) -> None:
    """Raise `DeviceError` if `name` cannot be planned for."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeviceError(f"a device is named by a text such as 'cpu' or 'h100', not {name!r}")
    if is_cuda(name):
        _check_cuda(name)
    elif name != CPU:
        modelled_device(name)


def check_measured(device: str) -> None:
    """Raise `DeviceError` for a device whose ops cannot be measured here."""
    check_device(device)
    if is_in_table(device):
        raise DeviceError(
            f"{device} is planned for by model, and a profile is measured: on a machine that has "
            f"one, with {option('device', 'cuda')}"
        )


def _check_cuda(name: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "a CUDA device is not here: this torch sees none. Plan for a model of it by name, "
            f"such as {option('device', 'h100')} ({', '.join(device_table().devices)}), or for "
            f"{option('device', CPU)}"
        )
    here = [f"{CUDA}:{i}" for i in range(torch.cuda.device_count())]
    if name not in (CUDA, *here):
        raise DeviceError(f"there is no device {name!r}: this torch sees {', '.join(here)}")


def rounded(size_bytes: int) -> int:
    """Bytes that the CUDA caching allocator takes where `size_bytes` are asked for."""
    # Blocks above 1 MiB may be larger, by up to 1 MiB each. `predict_reserved` counts
    # that, and a plan's peak does not.
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def counted_on(device: str) -> Allocated:
    """How a plan for `device`, which may be one of the table, counts what is allocated."""
    return rounded if has_cuda_allocator(device) else int


def allocated_on(device: str) -> Allocated:
    """How the allocator of `device` rounds; a CPU's does not."""
    return rounded if is_cuda(device) else int
