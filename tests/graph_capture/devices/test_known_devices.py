"""Links between ranks: those of the table of devices, and files of measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.devices.known_devices import (
    datasheet_links,
    device_table,
    links_between_ranks,
    read_rank_links,
)
from remat.graph_capture.devices.links import CollectiveTimes, RankLinks
from remat.graph_capture.errors import DeviceError

MADE = RankLinks(
    100,
    10,
    2,
    5,
    1,
    1.25,
    "made",
    8,
    (CollectiveTimes("all_gather", 8, (1000, 2000), (10.0, 30.0)),),
)


def test_links_that_makers_state_have_a_source() -> None:
    known = [name for name, one in device_table().devices.items() if one.network_gb_s]
    assert {"b200", "h200", "h100", "a100"} <= set(known)
    for name in known:
        device, links = device_table().devices[name], datasheet_links(name, 4)
        assert "https://" in device.ranks_source
        assert links.source == device.ranks_source
        assert links.inside_gb_s == pytest.approx(0.79 * device.peer_gb_s)
        assert links.between_gb_s == pytest.approx(0.95 * device.network_gb_s)
        assert links.node_size == 4


def test_a_step_is_costed_on_each_device_over_the_slowest_where_none_is_stated() -> None:
    for name, device in device_table().devices.items():
        links = links_between_ranks(name)
        stated = device.peer_gb_s or device.link_gb_s
        assert links.inside_gb_s == pytest.approx(0.79 * stated)
        assert device.network_gb_s or device.title in links.source
    slowest = min(one.link_gb_s for one in device_table().devices.values())
    unknown = links_between_ranks("cuda:0", "no such device")
    assert unknown.inside_gb_s == pytest.approx(0.79 * slowest)
    assert unknown.between_gb_s == pytest.approx(0.95 * 25)
    assert links_between_ranks("cuda:0", "NVIDIA H100 80GB HBM3") == links_between_ranks("h100")


def test_links_of_a_cpu_are_measured() -> None:
    assert links_between_ranks("cpu") == device_table().loopback
    assert device_table().loopback.source.startswith("measured")


def test_a_cluster_of_devices_whose_links_are_not_known_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"choose b200, .*no links between t4 GPUs are known"):
        datasheet_links("t4", 8)


def written(tmp_path: Path, **changed: object) -> Path:
    path = tmp_path / "links.json"
    path.write_text(json.dumps(msgspec.to_builtins(MADE) | changed))
    return path


def test_a_file_of_links_is_read(tmp_path: Path) -> None:
    found = read_rank_links(written(tmp_path), 4)
    assert found == msgspec.structs.replace(MADE, node_size=4)


def test_so_is_a_profile_that_has_links(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(Profile("cpu", "a machine", "2.13", {}, ranks=MADE).to_json())
    assert read_rank_links(path, 8) == MADE
    path.write_bytes(Profile("cpu", "a machine", "2.13", {}).to_json())
    with pytest.raises(DeviceError, match=r"is not a file of links .*Pass a profile of .*group="):
        read_rank_links(path, 8)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"inside_gb_s": 0}, "has an impossible rate or latency"),
        ({"inside_us": -1}, "has an impossible rate or latency"),
        ({"beside": 0.5}, "has beside 0.5"),
        ({"node_size": 0}, "has nodes of 0 ranks"),
        ({"beside": "x"}, "is not a file of links"),
        (
            {"measured": [{"kind": "all_gather", "ranks": 8, "size_bytes": [2, 1],
                           "time_us": [1, 2]}]},
            "an impossible table of all_gather over 8 ranks",
        ),
    ],
)  # fmt: skip
def test_a_file_of_links_that_cannot_be_is_refused(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DeviceError, match=said):
        read_rank_links(written(tmp_path, **changed), 8)
