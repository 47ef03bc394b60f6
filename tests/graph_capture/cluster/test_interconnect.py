"""Links between ranks: collectives by their bytes, and files of measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remat.graph_capture.cluster.interconnect import (
    Interconnect,
    Measured,
    interconnect_of,
    interconnect_table,
    read_interconnect,
)
from remat.graph_capture.devices.device_table import is_in_table
from remat.graph_capture.errors import DeviceError

PLAIN = Interconnect(100, 10, 2, 5, 1, 1.25, "made")
GIVEN = {
    "inside_gb_s": 100, "between_gb_s": 10, "inside_us": 2, "between_us": 5, "hop_us": 1,
    "beside": 1.25, "source": "made",
}  # fmt: skip


def test_a_gather_in_a_node_moves_what_others_hold() -> None:
    assert PLAIN.us("all_gather", 8e6, 8) == pytest.approx(2 + 8e6 * 7 / 8 / 100e3)


def test_a_gather_over_nodes_takes_in_the_rest_over_all_cards_of_a_node() -> None:
    between = 8e6 * (1 - 8 / 32) / (8 * 10e3)
    assert PLAIN.us("all_gather", 8e6, 32) == pytest.approx(5 + 3 + between)


def test_ranks_that_lie_apart_have_fewer_neighbours_in_a_node() -> None:
    assert PLAIN.us("all_gather", 8e6, 8, apart=8) == pytest.approx(
        5 + 7 + 8e6 * (1 - 1 / 8) / 10e3
    )


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    once = PLAIN.us("reduce_scatter", 1e6, 16)
    assert PLAIN.us("all_reduce", 1e6, 16) == 2 * once


def test_one_rank_has_nothing_to_say() -> None:
    assert PLAIN.us("all_reduce", 1e9, 1) == 0


@pytest.mark.parametrize(("compute", "collective"), [(100, 10), (10, 100), (50, 50), (0, 7)])
def test_what_runs_beside_a_collective_is_slowed_while_it_runs(
    compute: float, collective: float
) -> None:
    both = PLAIN.both_us(compute, collective)
    assert max(compute, collective) <= both <= compute + collective
    # Of the collective's time, a part of 1/1.25 is left for computations.
    assert both == max(collective, compute + collective * 0.2)


def test_measured_collectives_go_before_the_model() -> None:
    table = Measured("all_gather", 8, (1000, 2000), (10.0, 30.0))
    links = Interconnect(100, 10, 2, 5, 1, 1.0, "made", 8, (table,))
    assert links.us("all_gather", 1500, 8) == 20
    assert links.us("all_gather", 500, 8) == 10
    assert links.us("all_gather", 4000, 8) == 60
    assert links.us("all_gather", 1500, 4) != 20


def test_all_of_the_table_are_devices_with_a_source() -> None:
    for name, one in interconnect_table().interconnects.items():
        assert is_in_table(name)
        assert "https://" in one.source
        assert interconnect_of(name, 8).inside_gb_s < one.inside_gb_s


def test_links_of_a_device_that_are_not_known_are_refused() -> None:
    with pytest.raises(DeviceError, match="no links between t4 GPUs are known: choose b200"):
        interconnect_of("t4", 8)


def written(tmp_path: Path, **changed: object) -> Path:
    path = tmp_path / "links.json"
    path.write_text(json.dumps(GIVEN | changed))
    return path


def test_a_file_of_links_is_read(tmp_path: Path) -> None:
    found = read_interconnect(written(tmp_path), 4)
    assert found == Interconnect(100, 10, 2, 5, 1, 1.25, "made", 4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"inside_gb_s": 0}, "has a rate or a start that cannot be"),
        ({"inside_us": -1}, "has a rate or a start that cannot be"),
        ({"beside": 0.5}, "has beside 0.5"),
        ({"beside": "x"}, "is no file of links"),
        (
            {"measured": [{"kind": "all_gather", "ranks": 8, "size_bytes": [2, 1],
                           "time_us": [1, 2]}]},
            "a table of all_gather over 8 ranks that cannot be",
        ),
    ],
)  # fmt: skip
def test_a_file_of_links_that_cannot_be_is_refused(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DeviceError, match=said):
        read_interconnect(written(tmp_path, **changed), 8)
