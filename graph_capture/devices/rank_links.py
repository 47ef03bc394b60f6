"""Links between ranks, and the time of a collective over them. No torch.

A collective takes a start and the time of its bytes: the alpha-beta model (R. Hockney 1994,
https://doi.org/10.1016/S0167-8191(06)80021-9). A rank of n moves the share (n - 1) / n of the
whole, twice for a sum that all get (the "bus bandwidth" of nccl-tests,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). What comes from its own node
comes over the links inside; of what comes from other nodes, each GPU of the node takes a part over
its own card. Both go on at once. A ring takes one hop for each further node.

Computations beside a collective lose the multiprocessors that it takes: `beside` says how much
longer they take meanwhile. Without it, a plan that moves all weights for each microbatch looks
better than it is.

No rank times a collective by itself: it would wait for the others for ever.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from remat.graph_capture.costs.link_speeds import BYTES_PER_US_IN_GB_S, MOST_GB_S
from remat.graph_capture.graph import MOST_US

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
"""In an all-to-all each rank sends every other one a part of its own. What is sent goes whole from
each rank to another one, all of them at once."""
_MOST_BESIDE = 10


class Traffic(msgspec.Struct, frozen=True):
    kind: Collective
    whole_bytes: float  # of the whole tensor: all shards together
    ranks: int  # that take part
    here: int  # the most of them that one node has

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.here)

    @property
    def shares(self) -> tuple[float, float]:
        """Of the whole: what a rank moves inside its node, and over its own card."""
        n, here = self.ranks, self.here
        if self.kind == "all_to_all":
            return (here - 1) / n, 1 - here / n
        if self.kind == "send":
            return float(here > 1), float(n > here)
        return (here - 1) / here, (1 - here / n) / here


class CollectiveTimes(msgspec.Struct, frozen=True):
    """Times of one collective over so many ranks, by its whole bytes, ascending.

    `apart` is how many ranks lie between two neighbours of the group.
    """

    kind: Collective
    ranks: int
    size_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    apart: int = 1

    @property
    def is_sound(self) -> bool:
        pairs = zip(self.size_bytes, self.size_bytes[1:], strict=False)
        return (
            0 < len(self.size_bytes) == len(self.time_us)
            and all(a < b for a, b in pairs)
            and self.size_bytes[0] > 0
            and all(0 < us <= MOST_US for us in self.time_us)
            and min(self.ranks, self.apart) > 0
        )

    def us(self, size_bytes: float) -> float:
        """Between two sizes, and in proportion above the largest."""
        # Beyond the largest size only the bytes count, and no start any more.
        if size_bytes > self.size_bytes[-1]:
            return self.time_us[-1] * size_bytes / self.size_bytes[-1]
        return float(np.interp(size_bytes, self.size_bytes, self.time_us))


class RankLinks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Links of one rank with a GPU of its own, one way, and what collectives reach over them."""

    inside_gb_s: float  # to the ranks of its node
    between_gb_s: float  # to those of others
    inside_us: float  # start of a collective in a node
    between_us: float  # start of one over several
    hop_us: float  # of each further node of a ring
    beside: float  # what is computed beside a collective takes so many times as long
    source: str
    node_size: int = 8  # ranks
    measured: tuple[CollectiveTimes, ...] = ()  # these go before the model

    def __str__(self) -> str:
        return (
            f"{self.inside_gb_s:.3g} GB/s in a node and {self.between_gb_s:.3g} GB/s between, "
            f"{self.source}"
        )

    def us(self, kind: Collective, size_bytes: float, ranks: int, apart: int = 1) -> float:
        """Time of a collective over ranks that lie evenly, `apart` between two neighbours.

        `size_bytes` are of the whole, all shards together.
        """
        return self.collective_us(Traffic(kind, size_bytes, ranks, self._in_node(ranks, apart)))

    def collective_us(self, traffic: Traffic) -> float:
        """Of a collective that waits for none of its ranks."""
        if traffic.ranks <= 1:
            return 0.0
        for one in self.measured:
            at = one.kind, one.ranks, self._in_node(one.ranks, one.apart)
            if at == (traffic.kind, traffic.ranks, traffic.here):
                return one.us(traffic.whole_bytes)
        inside, between = traffic.shares
        moving_us = max(
            traffic.whole_bytes * inside / (self.inside_gb_s * BYTES_PER_US_IN_GB_S),
            traffic.whole_bytes * between / (self.between_gb_s * BYTES_PER_US_IN_GB_S),
        )
        # A sum that all get is reduced in shards, and these are then gathered.
        passes = 2 if traffic.kind == "all_reduce" else 1
        return passes * (self._start_us(traffic) + moving_us)

    def send_us(self, size_bytes: float, *, far: bool) -> float:
        return self.collective_us(Traffic("send", size_bytes, 2, 1 if far else 2))

    def both_us(self, compute_us: float, collective_us: float) -> float:
        """Time until both are done, where one goes on beside the other."""
        # Of the computation's speed, to the multiprocessors that the collective takes.
        lost = 1 - 1 / self.beside
        return max(collective_us, compute_us + collective_us * lost)

    def _in_node(self, ranks: int, apart: int) -> int:
        return max(1, min(ranks, self.node_size // apart))

    def _start_us(self, traffic: Traffic) -> float:
        if traffic.nodes == 1:
            return self.inside_us
        # A ring takes one hop for each further node.
        hops = 0 if traffic.kind == "send" else traffic.nodes - 1
        return self.between_us + self.hop_us * hops


def wrong_in(links: RankLinks) -> str:
    """What of links cannot be, in words, or empty: a file that was edited may say anything."""
    rates = links.inside_gb_s, links.between_gb_s
    starts = links.inside_us, links.between_us, links.hop_us
    if not all(0 < rate <= MOST_GB_S for rate in rates) or not all(
        0 <= us <= MOST_US for us in starts
    ):
        return "a rate or a start that cannot be: rates are above 0 GB/s"
    if not 1 <= links.beside <= _MOST_BESIDE:
        return f"beside {links.beside}: it is 1, for no loss, or a bit more"
    if links.node_size < 1:
        return f"nodes of {links.node_size} ranks: it is 1 or more"
    for one in links.measured:
        if not one.is_sound:
            return (
                f"a table of {one.kind} over {one.ranks} ranks that cannot be: as many times as "
                "sizes, all above 0, the sizes ascending"
            )
    return ""
