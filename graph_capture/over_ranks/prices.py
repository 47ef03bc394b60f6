"""Prices of collectives, by a model: from their bytes, the ranks, and the links between these.

No rank times a collective: by itself it would wait for the others for ever. A collective starts,
goes from rank to rank, and moves its bytes meanwhile, inside machines and between them at once. A
rank of n moves the share (n - 1) / n of the whole, twice for a sum that all get (the "bus
bandwidth" of nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). What
leaves a machine goes over the adapters of all its devices that take part.

Links are a profile's if it has measured them, else those of the table of devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import fx

from remat.graph_capture.devices.device_table import (
    CPU,
    MODELLED,
    device_table,
    is_in_table,
    modelled_device,
    table_name,
)
from remat.graph_capture.devices.link_speeds import GB_PER_US, RankLinks
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.over_ranks.collectives import is_collective
from remat.graph_capture.over_ranks.traffic import Traffic, traffic_of
from remat.graph_capture.prices.profile import Profile


def with_collectives_priced(
    graph: TrainingGraph,
    node_of_op: Mapping[str, fx.Node],
    device: str,
    title: str,
    profile: Profile | None = None,
) -> TrainingGraph:
    """`graph` with the modelled cost of each collective.

    Parameters
    ----------
    device : of the step, which may be one of the table. title : of the machine, where it is here.
    """
    nodes = {name: node for name, node in node_of_op.items() if is_collective(node)}
    if not nodes:
        return graph
    links = links_between_ranks(device, title, profile)
    return msgspec.structs.replace(
        graph,
        ops=tuple(_modelled_op(op, nodes.get(op.name), links) for op in graph.ops),
        prices=graph.prices if graph.prices == MODELLED else "mixed",
        notes=(*graph.notes, f"{len(nodes)} collectives are modelled: {links.source}"),
    )


def _modelled_op(op: Op, node: fx.Node | None, links: RankLinks) -> Op:
    if node is None:
        return op
    cost_us = collective_us(traffic_of(node, links.devices), links)
    return msgspec.structs.replace(op, cost_us=cost_us, price=MODELLED)


def collective_us(traffic: Traffic, links: RankLinks) -> float:
    """The time of one collective, which waits for none of its ranks."""
    passes = 2 if traffic.way == "reduce" else 1
    inside, between = _shares(traffic)
    moving_us = max(
        traffic.whole_bytes * inside / (links.inside_gb_s * GB_PER_US),
        traffic.whole_bytes * between / (links.between_gb_s * GB_PER_US),
    )
    hops_us = (traffic.here - 1) * links.inside_us + (traffic.machines - 1) * links.between_us
    return links.start_us + passes * (hops_us + moving_us)


def _shares(traffic: Traffic) -> tuple[float, float]:
    """Of the whole: what a rank moves inside its machine, and over its own adapter."""
    n, here = traffic.ranks, traffic.here
    if traffic.way == "exchange":
        return (here - 1) / n, 1 - here / n
    if traffic.way == "send":
        return float(here > 1), float(n > here)
    return (here - 1) / here, (1 - here / n) / here


def links_between_ranks(device: str, title: str, profile: Profile | None = None) -> RankLinks:
    """The links between ranks with such a device."""
    if profile is not None and profile.ranks is not None:
        return profile.ranks
    table = device_table()
    if device == CPU:
        one = table.loopback
        return RankLinks(
            one.gb_s, one.gb_s, one.start_us, one.inside_us, one.between_us, one.devices, one.source
        )
    name = device if is_in_table(device) else table_name(title)
    # One that the table lacks is taken to have no links of its own, and the slowest to its host.
    slowest = min(table.devices.values(), key=lambda one: one.peer_gb_s or one.link_gb_s)
    found = modelled_device(name) if name else slowest
    inside_gb_s, network = table.link_share * (found.peer_gb_s or found.link_gb_s), table.network
    source = (
        f"{table.link_share} of the {found.peer_gb_s or found.link_gb_s:g} GB/s that are stated "
        f"inside a machine for {found.title}, and of {network.gb_s:g} between machines"
    )
    return RankLinks(
        inside_gb_s, table.link_share * network.gb_s,
        network.start_us, network.inside_us, network.between_us, network.devices, source,
    )  # fmt: skip
