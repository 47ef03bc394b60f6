"""The time of a collective over links between ranks: against the formulas of rings."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.graph_capture.devices.links import Collective, CollectiveTimes, RankLinks, Traffic

MIB = 1 << 20
PLAIN = RankLinks(100, 10, 2, 5, 1, 1.25, "made")
KINDS: tuple[Collective, ...] = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"
)  # fmt: skip


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


def test_an_all_to_all_sends_each_rank_its_own_part() -> None:
    assert PLAIN.us("all_to_all", 8e6, 8) == pytest.approx(2 + 8e6 * 7 / 8 / 100e3)
    # Of 16 parts, 8 go to the other node, all over the rank's own card.
    assert PLAIN.us("all_to_all", 8e6, 16) == pytest.approx(5 + 1 + 8e6 / 2 / 10e3)


@pytest.mark.parametrize(("far", "us"), [(False, 2 + 8e6 / 100e3), (True, 5 + 8e6 / 10e3)])
def test_all_of_what_is_sent_goes_one_way(far: bool, us: float) -> None:
    assert PLAIN.send_us(8e6, far=far) == pytest.approx(us)


def test_one_rank_has_nothing_to_say() -> None:
    assert PLAIN.us("all_reduce", 1e9, 1) == 0


@given(
    kind=st.sampled_from(KINDS), log_bytes=st.integers(0, 33), here=st.integers(1, 8),
    nodes=st.integers(1, 64),
)  # fmt: skip
def test_more_bytes_and_slower_links_take_longer(
    kind: Collective, log_bytes: int, here: int, nodes: int
) -> None:
    one = Traffic(kind, 1 << log_bytes, here * nodes, here)
    taken = PLAIN.collective_us(one)
    assert taken >= (PLAIN.inside_us if one.ranks > 1 else 0)
    twice = msgspec.structs.replace(one, whole_bytes=2 << log_bytes)
    slower = msgspec.structs.replace(PLAIN, inside_gb_s=50.0, between_gb_s=5.0)
    assert PLAIN.collective_us(twice) >= taken
    assert slower.collective_us(one) >= taken
    assert PLAIN.collective_us(twice) == pytest.approx(slower.collective_us(one))


@pytest.mark.parametrize(("compute", "collective"), [(100, 10), (10, 100), (50, 50), (0, 7)])
def test_what_runs_beside_a_collective_is_slowed_while_it_runs(
    compute: float, collective: float
) -> None:
    both = PLAIN.both_us(compute, collective)
    assert max(compute, collective) <= both <= compute + collective
    # Of the collective's time, a part of 1/1.25 is left for computations.
    assert both == max(collective, compute + collective * 0.2)


def test_measured_collectives_go_before_the_model() -> None:
    table = CollectiveTimes("all_gather", 8, (1000, 2000), (10.0, 30.0))
    links = msgspec.structs.replace(PLAIN, measured=(table,))
    assert links.us("all_gather", 1500, 8) == 20
    assert links.us("all_gather", 500, 8) == 10
    assert links.us("all_gather", 4000, 8) == 60
    assert links.us("all_gather", 1500, 4) != 20
    assert links.us("all_gather", 1500, 8, apart=8) != 20
    assert links.us("reduce_scatter", 1500, 8) != 20
