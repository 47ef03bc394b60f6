"""Measuring a `Profile` of a model: the cost and the work of each distinct op of its step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from remat.graph_capture.costs.cache import CostCache, OpWork, Profile, ProfiledOp, work_of
from remat.graph_capture.costs.op_costs import examples, measure_costs_with
from remat.graph_capture.costs.op_times import ProgressCallback
from remat.graph_capture.devices.known_devices import (
    CPU,
    CUDA,
    check_measured,
    device_table,
    is_cuda,
    is_in_table,
    modelled_device,
)
from remat.graph_capture.devices.links import (
    BYTES_PER_US_IN_GB_S,
    MORE_THREADS,
    PINNED_MEMORY,
    PLANNED_SHARE,
    LinkPair,
    LinkSpeeds,
    file_pair,
)
from remat.graph_capture.devices.memory import LowerTiers
from remat.graph_capture.devices.placement import meter_of, resolved_device
from remat.graph_capture.distributed.collective_costs import measured_rank_links
from remat.graph_capture.errors import ProfileError, option
from remat.graph_capture.graph import Link, Links, TrainingGraph
from remat.graph_capture.spill_files import host_folder, require_writable
from remat.graph_capture.tracing.step_module import LossFunction
from remat.graph_capture.tracing.trace import trace
from remat.graph_capture.tracing.traced_step import Trace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# The links of a graph: measured on this machine and kept, from a profile, or from the table.


class _PlannedPair(NamedTuple):
    down: Link
    up: Link
    source: str  # of the rates, in words


def links_below(
    device: str, tiers: LowerTiers, profile: Profile | None = None, *, measure_again: bool = False
) -> Links:
    """Links with as much room as `tiers` has: of the profile or the table; of this machine from
    disk, else measured. ProfileError: the profile is of another machine and lacks them."""

    def pair(nvme_path: str) -> _PlannedPair:
        known = profile.links if profile is not None else None
        found = (known.nvme if nvme_path else known.host) if known else None
        # A folder's links say nothing of another one.
        if profile is not None and found and nvme_path in ("", found.place):
            return _planned(found, profile.title)
        if is_in_table(device):
            return _modelled_drive() if nvme_path else _modelled(device)
        title = meter_of(device).title
        if profile is not None and profile.title != title:  # they would say nothing of another
            raise ProfileError(_missing_text(profile.title, nvme_path))
        return _planned(measured_pair(device, nvme_path, measure_again=measure_again), title)

    host = pair("")
    if not tiers.nvme_path:
        return Links(host.down, host.up, tiers.host_bytes, source=host.source)
    drive = pair(tiers.nvme_path)
    return Links(
        host.down, host.up, tiers.host_bytes, drive.down, drive.up, tiers.nvme_bytes,
        tiers.nvme_path, source=f"{host.source}; {drive.source}",
    )  # fmt: skip


def relinked(graph: TrainingGraph, tiers: LowerTiers) -> TrainingGraph:
    """A graph of a file, with its own links to `tiers` if it has that room, else measured ones.
    ProfileError: it was measured on another machine."""
    own = graph.links
    if own is not None and tiers.nvme_path in ("", own.nvme_path):
        room = {"host_bytes": tiers.host_bytes, "nvme_bytes": tiers.nvme_bytes}
        below = {} if tiers.nvme_path else {"write": None, "read": None, "nvme_path": ""}
        return replace(graph, links=replace(own, **room, **below))
    if not is_of_here(graph):
        raise ProfileError(_missing_text(graph.versions.get("priced_on", "-"), tiers.nvme_path))
    return replace(graph, links=links_below(graph.device, tiers))


def is_of_here(graph: TrainingGraph) -> bool:
    """Whether the links of a graph's device can be told here: it is of the table, or this one."""
    device = graph.device
    return is_in_table(device) or graph.versions.get("priced_on") == meter_of(device).title


def measured_pair(device: str, nvme_path: str = "", *, measure_again: bool = False) -> LinkPair:
    """Both ways between a device of this machine and its host, or the host and a folder; kept."""
    cache = CostCache.of(meter_of(device))
    place = nvme_path or (PINNED_MEMORY if is_cuda(device) else host_folder())
    key = f"NVMe at {place}" if nvme_path else f"host: {place}"
    if measure_again or key not in cache.links:
        if is_cuda(device) and not nvme_path:
            from remat.graph_capture.devices.pinned_memory import pinned_pair

            cache.links[key] = pinned_pair(device)
        else:  # below a CPU's memory there are only files
            cache.links[key] = file_pair(place, MORE_THREADS if nvme_path else ())
        cache.save()
    return cache.links[key]


def kept_links(device: str) -> dict[str, LinkPair]:
    return dict(CostCache.of(meter_of(device)).links)


def _planned(pair: LinkPair, title: str) -> _PlannedPair:
    source = (
        f"{PLANNED_SHARE} of {pair.down.both_gb_s:.3g} GB/s to {pair.place} and "
        f"{pair.up.both_gb_s:.3g} back, measured at once on {title}"
    )
    return _PlannedPair(pair.down.planned, pair.up.planned, source)


def _modelled(device: str) -> _PlannedPair:
    table, one = device_table(), modelled_device(device)
    link = _as_stated(one.link_gb_s, table.link_latency_us)
    source = f"{table.link_share} of the {one.link_gb_s:g} GB/s that are stated for {one.title}"
    return _PlannedPair(link, link, source)


def _modelled_drive() -> _PlannedPair:
    table, drive = device_table(), device_table().nvme
    source = (
        f"NVMe {table.link_share} of the {drive.write_gb_s:g} GB/s to write and "
        f"{drive.read_gb_s:g} to read that are stated for {drive.title}"
    )
    down, up = (_as_stated(one, drive.latency_us) for one in (drive.write_gb_s, drive.read_gb_s))
    return _PlannedPair(down, up, source)


def _as_stated(gb_s: float, latency_us: float) -> Link:
    return Link(device_table().link_share * gb_s * BYTES_PER_US_IN_GB_S, latency_us)


def _missing_text(title: str, nvme_path: str) -> str:
    to, flag = (nvme_path, f" --nvme {nvme_path}") if nvme_path else ("its host", "")
    return (
        f"measure the links of {title} to {to} there, with remat profile MODEL{flag} -o FILE, or "
        f"leave out {option('nvme' if nvme_path else 'host')}: they are not known"
    )


def profile(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    device: str | None = None,
    nvme: str | None = None,
    group: ProcessGroup | None = None,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measure each distinct op of one training step on this machine, and the links to its host.

    The arguments are those of `remat.capture`, which takes the result as its `profile`, on this
    machine or another. ``Profile.to_json`` makes a file of it.

    Parameters
    ----------
    nvme : a folder on NVMe, whose links are measured too.
    group : ranks whose links are measured too. All of them must call.

    Raises
    ------
    CaptureError : `device` is not of this machine. RematError : a folder cannot be written.
    """
    if device is not None:
        check_measured(device)
    if nvme is not None:
        require_writable(nvme, "nvme")
    ranks = None  # first, so that no rank waits here for one whose model cannot be traced
    if group is not None:
        here = resolved_device(device, model)
        ranks = measured_rank_links(group, here, meter_of(here).title)
    traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target, device=device)
    return replace(measure(traced, nvme_path=nvme or "", progress=progress), ranks=ranks)


def measure(
    traced: Trace, *, nvme_path: str = "", progress: ProgressCallback | None = None
) -> Profile:
    meter, node_of = meter_of(traced.recipe.device), examples(traced.joint)
    cache = CostCache.of(meter)
    costs = measure_costs_with(traced, meter, cache, progress)[1]
    ops = {
        key: ProfiledOp(
            **msgspec.structs.asdict(cost),
            work=work_of(node_of[key]) if key in node_of else OpWork(),
        )
        for key, cost in costs.of_key.items()
    }
    kind = CUDA if is_cuda(meter.device) else CPU
    host = measured_pair(meter.device, measure_again=True)
    drive = measured_pair(meter.device, nvme_path, measure_again=True) if nvme_path else None
    steps = {} if costs.step is None else {traced.joint.timed_hash: costs.step}
    return Profile(
        kind, meter.title, str(torch.__version__), ops, {**meter.versions, **cache.clocks},
        steps, links=LinkSpeeds(host, drive),
    )  # fmt: skip
