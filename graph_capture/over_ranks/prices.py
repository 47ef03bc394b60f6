"""Prices of collectives: each by its traffic, over the links between ranks (`rank_links.py`).

Links are a profile's if it has measured them, else those of the table of devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
from torch import fx

from remat.graph_capture.devices.device_links import links_between_ranks
from remat.graph_capture.devices.device_table import MODELLED
from remat.graph_capture.devices.rank_links import RankLinks
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.over_ranks.collectives import is_collective
from remat.graph_capture.over_ranks.traffic import traffic_of
from remat.graph_capture.prices.profile import Profile

RANKS_OF_NODE = "LOCAL_WORLD_SIZE"
"""The variable in which torchrun says how many ranks a node has."""


def with_collectives_priced(
    graph: TrainingGraph, node_of_op: Mapping[str, fx.Node], links: RankLinks
) -> TrainingGraph:
    """`graph` with the modelled cost of each collective over those links."""
    nodes = {name: node for name, node in node_of_op.items() if is_collective(node)}
    if not nodes:
        return graph

    def priced(op: Op) -> Op:
        if op.name not in nodes:
            return op
        cost_us = links.collective_us(traffic_of(nodes[op.name], links.node_size))
        return msgspec.structs.replace(op, cost_us=cost_us, price=MODELLED)

    return msgspec.structs.replace(
        graph,
        ops=tuple(map(priced, graph.ops)),
        prices=graph.prices if graph.prices == MODELLED else "mixed",
        notes=(*graph.notes, f"{len(nodes)} collectives are modelled: {links}"),
    )


def links_of_step(device: str, title: str, profile: Profile | None = None) -> RankLinks:
    """The links between the ranks of a step, in nodes as torchrun says.

    Parameters
    ----------
    device : of the step, which may be one of the table. title : of the machine, where it is here.
    """
    found = profile.ranks if profile is not None else None
    found = found or links_between_ranks(device, title)
    node_size = int(os.environ.get(RANKS_OF_NODE, found.node_size))
    return msgspec.structs.replace(found, node_size=node_size)
