"""What one rank of several has of a whole step: shards, collectives, a share of the machine.

Each rank owns an equal part of each parameter, of its state and of its summed gradient, along the
first dimension and padded as FSDP2 pads. Before a layer runs its parameters are gathered, and the
gradients that it makes are reduced to shards. The device waits for each collective: none is hidden
behind computations, so a real step may be faster. Ranks of one machine share its host, its NVMe
and the rate of its memory evenly; each has a link of its own to the host.
"""

from __future__ import annotations

from dataclasses import fields

from msgspec.structs import replace

from remat.graph_capture.devices.known_devices import (
    device_table,
    plan_rounding,
)
from remat.graph_capture.devices.links import BYTES_PER_US_IN_GB_S, RankLinks
from remat.graph_capture.distributed.sharding import Sharding, element_bytes
from remat.graph_capture.errors import DeviceError, option
from remat.graph_capture.graph import Link, Links, TrainingGraph
from remat.whole_step.microbatch import Microbatch, Ranks, UpdateGroup

_TAKEN = ("kind", "world_size", "reshard_after_forward")
"""What a whole step takes of a sharding: it finds layers by structure."""


def share_of(ranks: Ranks, machine: Links, host_gb_s: float) -> Links:
    """One rank's share of a machine; no link is faster than its share of the host's memory."""
    n, most = ranks.here, host_gb_s / ranks.here * BYTES_PER_US_IN_GB_S

    def part(link: Link | None) -> Link | None:
        return link and Link(link.bytes_per_us / n, link.latency_us)

    def capped(link: Link) -> Link:
        return Link(min(link.bytes_per_us, most), link.latency_us)

    return replace(
        machine, host_bytes=machine.host_bytes // n, nvme_bytes=machine.nvme_bytes // n,
        d2h=capped(machine.d2h), h2d=capped(machine.h2d),
        write=part(machine.write), read=part(machine.read),
    )  # fmt: skip


def beside_collectives(links: Links, microbatch: Microbatch) -> Links:
    """The links that are left for copies where collectives go by them too."""
    ranks = microbatch.ranks
    if ranks is None or not ranks.over_host:
        return links
    taken_us = microbatch.collectives_us(gathers=1 if ranks.keeps_whole else 2, reductions=1)
    # A step takes at least this long: copies have the link for the rest of it.
    slow = links.slower(microbatch.least_us / (microbatch.least_us + taken_us))
    return replace(links, d2h=slow.d2h, h2d=slow.h2d)


def in_shards(ranks: Ranks, microbatch: Microbatch, graph: TrainingGraph) -> Microbatch:
    """The microbatch with the groups of one rank: a shard of each parameter."""

    def shard_of(group: UpdateGroup) -> UpdateGroup:
        gradient_of, updated = group.gradient_of, group.updated
        shapes = (graph.value_by_name[name].shape for name in updated)
        return replace(
            group, trained=sum(map(ranks.shard_elements, shapes)),
            parameter_bytes=sum(shard_bytes(ranks, graph, name, name) for name in gradient_of),
            gradient_bytes=sum(shard_bytes(ranks, graph, p, gradient_of[p]) for p in updated),
            whole_parameter_bytes=group.parameter_bytes, whole_gradient_bytes=group.gradient_bytes,
        )  # fmt: skip

    return replace(microbatch, groups=tuple(map(shard_of, microbatch.groups)), ranks=ranks)


def shard_bytes(ranks: Ranks, graph: TrainingGraph, parameter: str, typed: str) -> int:
    """Of a parameter's shard in the type of the value `typed`: the parameter, or its gradient."""
    # A gradient's storage may be made in another shape, and shown transposed.
    elements = ranks.shard_elements(graph.value_by_name[parameter].shape)
    item_bytes = element_bytes(graph.value_by_name[typed].dtype)
    return plan_rounding(graph.device)(elements * item_bytes)


def ranks_of(sharding: Sharding, device: str, links: RankLinks, host_gb_s: float) -> Ranks | None:
    """None for one rank. `links` between ranks, `host_gb_s` of a machine's memory."""
    if sharding.kind == "none":
        return None
    here = min(sharding.world_size, links.node_size)
    known = device_table().devices.get(device)
    over_host = known is not None and not known.peer_gb_s
    if over_host:
        links = replace(links, inside_gb_s=min(links.inside_gb_s, host_gb_s / here))
    keeps_whole = sharding.reshard_after_forward is False
    return Ranks(sharding.world_size, here, links, over_host, keeps_whole)


def require_shards(sharding: Sharding) -> None:
    """Refuses ways to shard that a whole step does not take."""
    if sharding.kind == "none":
        return
    if sharding.kind != "fsdp2":
        raise DeviceError(
            f"choose the sharding fsdp2, or leave out {option('microbatches')}: each rank of a "
            f"whole step has a part of everything, which {sharding.kind} does not give"
        )
    for one in fields(sharding):
        if one.name not in _TAKEN and getattr(sharding, one.name) != one.default:
            raise DeviceError(
                f"leave out {one.name} of the sharding, or {option('microbatches')}: a whole step "
                "finds its layers by structure, and keeps on the host what does not fit"
            )
    keep = sharding.reshard_after_forward
    if sharding.world_size < 2 or not (keep is None or isinstance(keep, bool)):
        raise DeviceError(
            f"choose 2 or more ranks, and reshard_after_forward yes or no: a whole step over "
            f"{sharding.world_size} ranks keeps parameters whole or in shards, not {keep}"
        )
