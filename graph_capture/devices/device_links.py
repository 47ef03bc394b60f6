"""Links between ranks with a device of the table or of this machine, and those of a file. No torch.

The table has what makers state, and the shares of it that collectives reach. A file has what was
measured: the fields of `RankLinks`, or a profile that `remat.profile` measured over a group.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from remat.graph_capture.devices.device_table import (
    CPU,
    Device,
    device_table,
    is_in_table,
    modelled_device,
    table_name,
)
from remat.graph_capture.devices.rank_links import RankLinks, wrong_in
from remat.graph_capture.errors import DeviceError, TextError, option
from remat.graph_capture.files.contents import read_contents
from remat.graph_capture.files.json_text import decoded


class _OfProfile(msgspec.Struct):
    """What concerns ranks in the file of a profile; a file of links has no such field."""

    ranks: RankLinks | None = None


def links_between_ranks(device: str, title: str = "") -> RankLinks:
    """Links of any device; where the table has none of it, the slowest that it has.

    Parameters
    ----------
    device : of the table, or of this machine. title : of the machine, where it is here.
    """
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
    lacking = msgspec.structs.replace(
        found, peer_gb_s=found.peer_gb_s or found.link_gb_s, network_gb_s=network_gb_s
    )
    way = "by links" if found.peer_gb_s else "over the host"
    return _as_reached(
        lacking,
        f"{lacking.peer_gb_s:g} GB/s {way} as stated for {found.title}, and between nodes the "
        f"slowest card of the table, {network_gb_s:g} GB/s",
    )


def stated_links(device: str, node_size: int) -> RankLinks:
    """Links of a device for which makers state both, in nodes of that size.

    Raises
    ------
    DeviceError : the table has none of it.
    """
    known = [name for name, one in device_table().devices.items() if one.network_gb_s]
    if device not in known:
        raise DeviceError(
            f"no links between {device} GPUs are known: choose {', '.join(known)}, "
            f"or give a file of measured ones by {option('links')}"
        )
    return msgspec.structs.replace(links_between_ranks(device), node_size=node_size)


def _as_reached(device: Device, source: str) -> RankLinks:
    table = device_table().between_ranks
    return RankLinks(
        device.peer_gb_s * table.inside_share, device.network_gb_s * table.between_share,
        table.inside_us, table.between_us, table.hop_us, table.beside, source, table.node_size,
    )  # fmt: skip


def read_rank_links(path: Path, node_size: int) -> RankLinks:
    """Links from a file of the fields of `RankLinks`, or from a profile that has some.

    Raises
    ------
    DeviceError : it is no such file, or a figure cannot be. FileError : it cannot be read.
    """
    contents = read_contents(path)
    try:
        found = decoded(contents, _OfProfile).ranks or decoded(contents, RankLinks)
    except TextError as error:
        raise DeviceError(
            f"{path} is no file of links ({error}): it is a profile of remat.profile(..., "
            "group=...), or has inside_gb_s, between_gb_s, inside_us, between_us, hop_us, beside, "
            "source, and measured where collectives were timed"
        ) from error
    wrong = wrong_in(found)
    if wrong:
        raise DeviceError(f"{path} has {wrong}")
    return msgspec.structs.replace(found, node_size=node_size)
