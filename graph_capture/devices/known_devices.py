"""Names of devices: the table of `devices.json`, which names can be planned for, and rounding.

The table holds what makers state, with its source: dense peak rates, and memory as sold, in units
of 10^9 bytes, a little less than a driver shows. ``cpu`` and ``cuda`` are of this machine.
`shares.json` has what kinds of ops reach of that, fitted to published times of training steps.
"""

from __future__ import annotations

import difflib
import functools
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, SupportsIndex

import msgspec
from msgspec.structs import replace

from remat.graph_capture.devices.links import RankLinks, wrong_in
from remat.graph_capture.errors import BudgetError, DeviceError, TextError, option
from remat.graph_capture.files import decode_json, read_contents

CPU, CUDA = "cpu", "cuda"
MODELLED = "modelled"  # `TrainingGraph.cost_origin` where costs are those of a device of the table
ALLOCATION_BYTES = 512  # the CUDA caching allocator rounds every size up to a multiple of it
GB = 1e9
_WHOLE = 0.9  # of the memory as sold: a driver shows more, or with ECC up to 2 % less
DEVICES_FILE = Path(__file__).with_name("devices.json")
SHARES_FILE = Path(__file__).with_name("shares.json")

WorkKind = Literal[
    "matmul", "convolution", "depthwise", "attention", "attention_backward", "norm",
    "norm_backward", "softmax", "reduction", "lookup_backward", "other",
]  # fmt: skip

OF_PRODUCTS = ("matmul", "convolution", "depthwise", "attention", "attention_backward")

Allocated = Callable[[int], int]  # from bytes that are asked for to bytes that the allocator takes


class Efficiency(msgspec.Struct, frozen=True):
    """Shares of the peak rate and of the peak bandwidth that a kind of op is taken to reach."""

    rate: float
    bandwidth: float


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    title: str
    memory_gb: float
    bandwidth_gb_s: float
    link_gb_s: float  # to the host, one way
    tflops: dict[str, float]  # peak by dtype; ``tf32`` is float32 as tensor cores may round it
    source: str
    generation: str = "any"  # of the chip, as in `shares.json`
    peer_gb_s: float = 0.0  # to others of a node, one way; 0 where they go by the host's link
    network_gb_s: float = 0.0  # of its own card to other nodes, one way; 0 where none is stated
    ranks_source: str = ""  # of these two
    driver_titles: tuple[str, ...] = ()  # how drivers call it, without ``NVIDIA``

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * GB)

    @property
    def bytes_per_us(self) -> float:
        return self.bandwidth_gb_s * GB / 1e6

    def flops_per_us(self, dtype: str) -> float:
        return self.tflops.get(dtype, self.tflops["float32"]) * 1e6


class _Drive(msgspec.Struct, frozen=True):
    """A drive on NVMe, as its maker states it; `latency_us` is that of a read."""

    title: str
    write_gb_s: float
    read_gb_s: float
    latency_us: float
    source: str


class _BetweenRanks(msgspec.Struct, frozen=True):
    """What collectives reach between GPUs, whatever the GPU: see `RankLinks`."""

    inside_share: float  # of the rates that makers state
    between_share: float
    inside_us: float
    between_us: float
    hop_us: float
    share_reason: str
    beside: float
    beside_reason: str
    node_size: int


class _DeviceTable(msgspec.Struct, frozen=True):
    kinds: dict[str, WorkKind]  # by how the names of targets begin; all others are ``other``
    launch_us: float  # least time of any op
    link_share: float  # of a stated rate, that copies reach
    link_latency_us: float  # of a copy to the host or back
    link_reason: str
    nvme: _Drive  # in a machine that is not here
    between_ranks: _BetweenRanks
    loopback: RankLinks  # between processes of one CPU, over gloo
    devices: dict[str, Device]


@functools.cache
def device_table() -> _DeviceTable:
    return msgspec.json.decode(DEVICES_FILE.read_bytes(), type=_DeviceTable)


@functools.cache
def _shares() -> dict[str, dict[WorkKind, Efficiency]]:
    return msgspec.json.decode(SHARES_FILE.read_bytes(), type=dict[str, dict[WorkKind, Efficiency]])


def shares_of(device: Device) -> dict[str, Efficiency]:
    """By kind of op: those of the device's generation, else of any."""
    return {**_shares()["any"], **_shares()[device.generation]}


@functools.cache
def kind_of_target(target: str) -> WorkKind:
    for begin, kind in device_table().kinds.items():
        if target.startswith(begin):
            return kind
    return "other"


def is_in_table(name: str) -> bool:
    return name in device_table().devices


def modelled_device(name: str) -> Device:
    known = device_table().devices
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose cpu, {', '.join(known)}"
    raise DeviceError(f"no device {name!r}: {hint}")


def table_name(title: str) -> str:
    """The name in the table of a device that its driver calls `title`; empty if it is not there."""
    shown = title.removeprefix("NVIDIA ")  # older drivers leave it out
    # The whole title, as a part of one names slices (MIG), laptops' and other variants too.
    known = device_table().devices.items()
    return next((name for name, one in known if shown in one.driver_titles), "")


def title_with_memory(title: str, memory_bytes: int) -> str:
    """`title` as the driver gives it, told apart where a part of that device's memory is here."""
    whole = device_table().devices.get(table_name(title))
    if whole is None or memory_bytes >= _WHOLE * whole.memory_bytes:
        return title
    return f"{title}, {memory_bytes / GB:.1f} GB of it"


def is_cuda(name: str) -> bool:
    """Whether `name` is of a CUDA device of this machine: ``cuda`` or ``cuda:0``."""
    return name.partition(":")[0] == CUDA


def has_cuda_allocator(name: str) -> bool:
    return is_cuda(name) or is_in_table(name)  # all of the table are NVIDIA's


def check_device(name: str) -> None:
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeviceError(f"give a device as a string such as 'cpu' or 'h100', not {name!r}")
    if is_cuda(name):
        _check_cuda(name)
    elif name != CPU:
        modelled_device(name)


def check_measured(device: str) -> None:
    check_device(device)
    if is_in_table(device):
        raise DeviceError(
            f"make the profile on a machine that has one, with {option('device', 'cuda')}: "
            f"profiles are measured, and {device} is only modelled here"
        )


def _check_cuda(name: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            f"plan for a model of a CUDA device, such as {option('device', 'h100')} "
            f"({', '.join(device_table().devices)}), or for {option('device', CPU)}: this torch "
            "sees no CUDA device"
        )
    here = [f"{CUDA}:{i}" for i in range(torch.cuda.device_count())]
    if name not in (CUDA, *here):
        raise DeviceError(f"there is no device {name!r}: this torch sees {', '.join(here)}")


def rounded(size_bytes: int) -> int:
    # Blocks above 1 MiB may be larger by up to 1 MiB: `predict_reserved` counts that, no peak does.
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def plan_rounding(device: str) -> Allocated:
    """How a plan for `device`, which may be one of the table, counts what is allocated."""
    return rounded if has_cuda_allocator(device) else int


def allocator_rounding(device: str) -> Allocated:
    """How the allocator of `device` rounds; a CPU's does not."""
    return rounded if is_cuda(device) else int


# How a number of bytes is written: `8GiB`, `1.5GB`, or an int.

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20,
    "gib": 2**30, "tib": 2**40,
}  # fmt: skip
NUMBER = r"([+-]?\d{1,30}(?:\.\d*)?|[+-]?\.\d+)"  # no more digits, or a float would be infinite


def checked_bytes(given: SupportsIndex, what: str, forms: str) -> int:
    """An int as bytes. `what` names it in errors, `forms` says how it may be written."""
    if isinstance(given, bool):  # a bool has an index too, and is no size
        raise BudgetError(f"give {what} as bytes in an int, or as {forms}: {given!r} is no size")
    try:
        return operator.index(given)
    except TypeError as error:
        raise BudgetError(
            f"give {what} as whole bytes in an int, or as a string such as {forms}: {given!r} is "
            f"a {type(given).__name__}"
        ) from error


def parse_bytes(text: str, what: str, forms: str, unless: str = "") -> int:
    """A text with a unit as bytes. `unless`: what it could have meant without one, as ``%``."""
    if (match := re.fullmatch(rf"{NUMBER}\s*([a-z]*)", text.lower())) is None:
        raise BudgetError(f"{what} {text!r} cannot be read: write it like {forms}")
    number, unit = match.groups()
    if not unit:
        others = f"{number}{unless}, " if unless else ""
        raise BudgetError(
            f"{what} {text!r} has no unit. Did you mean {number} bytes? Write {others}{number}MiB "
            f"or {number}GiB"
        )
    if unit not in _UNITS:
        raise BudgetError(
            f"{what} {text!r} has an unknown unit {unit!r}: write {number}MiB or {number}GiB "
            f"(units: B, kB, MB, GB, KiB, MiB, GiB)"
        )
    return int(float(number) * _UNITS[unit])


# Links between ranks with a device of the table or of this machine, and those of a file. No torch.


class _OfProfile(msgspec.Struct):
    """What concerns ranks in the file of a profile; a file of links has no such field."""

    ranks: RankLinks | None = None


def links_between_ranks(device: str, title: str = "") -> RankLinks:
    """Links of any device; where the table has none of it, the slowest that it has."""
    table = device_table()
    if device == CPU:
        return table.loopback
    name = device if is_in_table(device) else table_name(title)
    # One that the table lacks is taken to have no links of its own, and the slowest to its host.
    slowest = min(table.devices.values(), key=lambda one: one.peer_gb_s or one.link_gb_s)
    found = modelled_device(name) if name else slowest
    if found.network_gb_s:
        return _as_reached(found, found.ranks_source)
    network_gb_s = min(one.network_gb_s for one in table.devices.values() if one.network_gb_s)
    peer_gb_s = found.peer_gb_s or found.link_gb_s
    way = "by links" if found.peer_gb_s else "over the host"
    return _as_reached(
        replace(found, peer_gb_s=peer_gb_s, network_gb_s=network_gb_s),
        f"{peer_gb_s:g} GB/s {way} as stated for {found.title}; between nodes {network_gb_s:g} "
        "GB/s, the slowest card of the table",
    )


def datasheet_links(device: str, node_size: int) -> RankLinks:
    """Links of a device for which makers state both. Raises DeviceError if the table has none."""
    known = [name for name, one in device_table().devices.items() if one.network_gb_s]
    if device not in known:
        raise DeviceError(
            f"choose {', '.join(known)}, or pass measured links with {option('links')}: no links "
            f"between {device} GPUs are known"
        )
    return replace(links_between_ranks(device), node_size=node_size)


def _as_reached(device: Device, source: str) -> RankLinks:
    table = device_table().between_ranks
    return RankLinks(
        device.peer_gb_s * table.inside_share, device.network_gb_s * table.between_share,
        table.inside_us, table.between_us, table.hop_us, table.beside, source, table.node_size,
    )  # fmt: skip


def read_rank_links(path: Path, node_size: int) -> RankLinks:
    """From a file of the fields of `RankLinks`, or from a profile; DeviceError for any other."""
    contents = read_contents(path)
    try:
        found = decode_json(contents, _OfProfile).ranks or decode_json(contents, RankLinks)
    except TextError as error:
        raise DeviceError(
            f"{path} is not a file of links ({error}). Pass a profile of remat.profile(..., "
            "group=...), or JSON with inside_gb_s, between_gb_s, inside_us, between_us, hop_us, "
            "beside, source, and measured where collectives were timed"
        ) from error
    if wrong := wrong_in(found):
        raise DeviceError(f"{path} has {wrong}")
    return replace(found, node_size=node_size)
