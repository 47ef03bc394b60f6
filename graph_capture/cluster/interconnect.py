"""Links between the ranks of a cluster, and the times of collectives over them. No torch.

A collective takes a start and the time of its bytes: the alpha-beta model (R. Hockney 1994,
https://doi.org/10.1016/S0167-8191(06)80021-9). A rank gathers what the others hold. What comes from
its own node comes over the links inside; of what comes from other nodes, each GPU of the node takes
a part over its own card. Both go on at once. A ring takes one hop for each further node.

`interconnects.json` has what makers state, and the shares of it that collectives reach. A file of
`--links` has what was measured: either the same rates, or whole tables of collectives.

Computations beside a collective lose the multiprocessors that it takes: `beside` says how much
longer they take meanwhile. Without it, a plan that moves all weights for each microbatch looks
better than it is.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from remat.graph_capture.errors import DeviceError, TextError
from remat.graph_capture.files.contents import read_contents
from remat.graph_capture.files.json_text import decoded

TABLE = Path(__file__).with_name("interconnects.json")
GB_PER_US = 1e3
"""Bytes a microsecond in a GB/s."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]


class Measured(msgspec.Struct, frozen=True):
    """Times of one collective over so many ranks, by its whole bytes, ascending.

    Attributes
    ----------
    ranks : of the group. apart : how many ranks lie between two neighbours of it.
    """

    kind: Collective
    ranks: int
    size_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    apart: int = 1

    def us(self, size_bytes: float) -> float:
        """Between two sizes, and in proportion above the largest."""
        if size_bytes > self.size_bytes[-1]:
            return self.time_us[-1] * size_bytes / self.size_bytes[-1]
        return float(np.interp(size_bytes, self.size_bytes, self.time_us))


class Interconnect(msgspec.Struct, frozen=True):
    """Links of one GPU, one way, and what collectives reach over them.

    Attributes
    ----------
    inside_gb_s, between_gb_s : to the GPUs of its node, and to those of others.
    inside_us, between_us : start of a collective in a node, and over several. hop_us : of each
        further node of a ring.
    beside : how much longer what is computed beside a collective takes.
    node_size : GPUs of a node. source : of the figures.
    measured : collectives whose times were measured; they go before the model.
    """

    inside_gb_s: float
    between_gb_s: float
    inside_us: float
    between_us: float
    hop_us: float
    beside: float
    source: str
    node_size: int = 8
    measured: tuple[Measured, ...] = ()

    def us(self, kind: Collective, size_bytes: float, ranks: int, apart: int = 1) -> float:
        """Time of a collective.

        Parameters
        ----------
        size_bytes : of the whole, all shards together. apart : how many ranks lie between two
            neighbours of the group, as all of a tensor parallel group do.
        """
        if ranks <= 1:
            return 0.0
        for one in self.measured:
            if (one.kind, one.ranks, one.apart) == (kind, ranks, apart):
                return one.us(size_bytes)
        once_us = self._once_us(size_bytes, ranks, self._in_node(ranks, apart))
        return 2 * once_us if kind == "all_reduce" else once_us

    def send_us(self, size_bytes: float, *, far: bool) -> float:
        """Time to send to a neighbour: `far` is one of another node."""
        if far:
            return self.between_us + size_bytes / (self.between_gb_s * GB_PER_US)
        return self.inside_us + size_bytes / (self.inside_gb_s * GB_PER_US)

    def both_us(self, compute_us: float, collective_us: float) -> float:
        """Time until both are done, where one goes on beside the other."""
        lost = 1 - 1 / self.beside
        return max(collective_us, compute_us + collective_us * lost)

    def _in_node(self, ranks: int, apart: int) -> int:
        return max(1, min(ranks, self.node_size // apart))

    def _once_us(self, size_bytes: float, ranks: int, near: int) -> float:
        inside = size_bytes * (near - 1) / near / (self.inside_gb_s * GB_PER_US)
        if near == ranks:
            return self.inside_us + inside
        between = size_bytes * (1 - near / ranks) / (near * self.between_gb_s * GB_PER_US)
        return self.between_us + self.hop_us * (ranks // near - 1) + max(inside, between)


class Stated(msgspec.Struct, frozen=True):
    """Rates that a maker states, one way."""

    inside_gb_s: float
    between_gb_s: float
    source: str


class InterconnectTable(msgspec.Struct, frozen=True):
    """All of `interconnects.json`."""

    inside_share: float
    between_share: float
    inside_us: float
    between_us: float
    hop_us: float
    share_reason: str
    beside: float
    beside_reason: str
    interconnects: dict[str, Stated]


@functools.cache
def interconnect_table() -> InterconnectTable:
    """The table of this release."""
    return msgspec.json.decode(TABLE.read_bytes(), type=InterconnectTable)


def interconnect_of(device: str, node_size: int) -> Interconnect:
    """The links of a device of the table, as collectives reach them.

    Raises
    ------
    DeviceError : the table has none of it.
    """
    table = interconnect_table()
    stated = table.interconnects.get(device)
    if stated is None:
        raise DeviceError(
            f"no links between {device} GPUs are known: choose {', '.join(table.interconnects)}, "
            "or give a file of measured ones with --links"
        )
    return Interconnect(
        stated.inside_gb_s * table.inside_share, stated.between_gb_s * table.between_share,
        table.inside_us, table.between_us, table.hop_us, table.beside, stated.source, node_size,
    )  # fmt: skip


def read_interconnect(path: Path, node_size: int) -> Interconnect:
    """Links from a file of the fields of `Interconnect`.

    Raises
    ------
    DeviceError : it is no such file, or a figure cannot be. FileError : it cannot be read.
    """
    try:
        found = decoded(read_contents(path), Interconnect)
    except TextError as error:
        raise DeviceError(
            f"{path} is no file of links ({error}): it has inside_gb_s, between_gb_s, inside_us, "
            "between_us, hop_us, beside, source, and measured where collectives were timed"
        ) from error
    _check_figures(found, path)
    return msgspec.structs.replace(found, node_size=node_size)


def _check_figures(found: Interconnect, path: Path) -> None:
    rates = found.inside_gb_s, found.between_gb_s
    starts = found.inside_us, found.between_us, found.hop_us
    if not all(0 < rate < 1e6 for rate in rates) or not all(0 <= us < 1e9 for us in starts):
        raise DeviceError(f"{path} has a rate or a start that cannot be: rates are above 0 GB/s")
    if not 1 <= found.beside <= 10:
        raise DeviceError(f"{path} has beside {found.beside}: it is 1, for no loss, or a bit more")
    for one in found.measured:
        is_ascending = all(a < b for a, b in zip(one.size_bytes, one.size_bytes[1:], strict=False))
        has_all = 0 < len(one.size_bytes) == len(one.time_us)
        if not (has_all and is_ascending and min(one.size_bytes) > 0 and min(one.time_us) > 0):
            raise DeviceError(
                f"{path} has a table of {one.kind} over {one.ranks} ranks that cannot be: as many "
                "times as sizes, all above 0, the sizes ascending"
            )
