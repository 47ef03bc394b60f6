"""What a collective moves: its kind, its bytes, and the ranks and machines that take part."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch.distributed as dist
from torch import fx

from remat.graph_capture.joint.nodes import tensors_of
from remat.graph_capture.over_ranks.collectives import groups_of, op_name

Way = Literal["gather", "reduce", "exchange", "send"]
"""How bytes go: each rank gets the parts of all (or gives them, which is as long); first one, then
the other; each rank sends every other one a part of its own; all of it goes from rank to rank."""

_WAYS: dict[str, Way] = {
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "gather",
    "all_reduce": "reduce",
    "all_to_all_single": "exchange",
    "shard_dim_alltoall": "exchange",
}
"""By how the names of ops begin; all others send."""
MACHINE = "LOCAL_WORLD_SIZE"
"""The variable in which torchrun says how many ranks a machine has."""


class Traffic(msgspec.Struct, frozen=True):
    """One collective.

    Attributes
    ----------
    way : how its bytes go. whole_bytes : of the whole tensor, on the side where it is whole.
    ranks : that take part. here : the most of them that one machine has.
    """

    way: Way
    whole_bytes: int
    ranks: int
    here: int

    @property
    def machines(self) -> int:
        """How many machines take part."""
        return -(-self.ranks // self.here)


def traffic_of(node: fx.Node, ranks_of_a_machine: int) -> Traffic:
    """What a node moves that is a collective.

    Parameters
    ----------
    ranks_of_a_machine : where torchrun does not say it.
    """
    name = op_name(node)
    ways: list[Way] = [way for begin, way in _WAYS.items() if name.startswith(begin)]
    ranks = members_of(node)
    per_machine = int(os.environ.get(MACHINE, ranks_of_a_machine))
    here = max(Counter(rank // per_machine for rank in ranks).values())
    read_bytes = sum(_tensor_bytes(source) for source in node.all_input_nodes)
    return Traffic(
        ways[0] if ways else "send", max(read_bytes, _tensor_bytes(node)), len(ranks), here
    )


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
