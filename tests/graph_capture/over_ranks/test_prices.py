"""The model of a collective's time: against the formulas of rings, and what it says of links."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.graph_capture.devices.device_table import device_table
from remat.graph_capture.devices.link_speeds import RankLinks
from remat.graph_capture.errors import ProfileError
from remat.graph_capture.over_ranks.prices import collective_us, links_between_ranks
from remat.graph_capture.over_ranks.traffic import Traffic, Way
from remat.graph_capture.prices.profile import Profile

MIB = 1 << 20
LINKS = RankLinks(100.0, 10.0, 20.0, 2.0, 4.0, 8, "made up")
WAYS: tuple[Way, ...] = ("gather", "reduce", "exchange", "send")


def test_one_machine_is_a_ring() -> None:
    """(n - 1) / n of the bytes, and twice that where all get the sum."""
    gather = collective_us(Traffic("gather", 64 * MIB, 8, 8), LINKS)
    assert gather == pytest.approx(20 + 7 * 2 + 64 * MIB * 7 / 8 / 100e3)
    reduce = collective_us(Traffic("reduce", 64 * MIB, 8, 8), LINKS)
    assert reduce - 20 == pytest.approx(2 * (gather - 20))


def test_all_devices_of_a_machine_share_what_leaves_it() -> None:
    links = msgspec.structs.replace(LINKS, inside_gb_s=1000.0)
    alone = collective_us(Traffic("gather", 64 * MIB, 2, 1), links)
    shared = collective_us(Traffic("gather", 64 * MIB, 16, 8), links)
    assert alone == pytest.approx(20 + 4 + 64 * MIB / 2 / 10e3)
    assert shared == pytest.approx(20 + 7 * 2 + 4 + 64 * MIB / 2 / 8 / 10e3)


@given(
    way=st.sampled_from(WAYS), log_bytes=st.integers(0, 33), here=st.integers(1, 8),
    machines=st.integers(1, 64),
)  # fmt: skip
def test_more_bytes_and_slower_links_take_longer(
    way: Way, log_bytes: int, here: int, machines: int
) -> None:
    one = Traffic(way, 1 << log_bytes, here * machines, here)
    taken = collective_us(one, LINKS)
    assert taken >= LINKS.start_us
    twice = msgspec.structs.replace(one, whole_bytes=2 << log_bytes)
    slower = msgspec.structs.replace(LINKS, inside_gb_s=50.0, between_gb_s=5.0)
    assert collective_us(twice, LINKS) >= taken
    assert collective_us(one, slower) >= taken
    assert collective_us(twice, LINKS) == pytest.approx(collective_us(one, slower))


def test_each_device_of_the_table_has_links() -> None:
    for name, device in device_table().devices.items():
        links = links_between_ranks(name, "")
        stated = device.peer_gb_s or device.link_gb_s
        assert links.inside_gb_s == pytest.approx(device_table().link_share * stated)
        assert device.title in links.source
    assert links_between_ranks("cuda:0", "no such device").inside_gb_s == pytest.approx(
        device_table().link_share * min(d.link_gb_s for d in device_table().devices.values())
    )
    assert device_table().loopback.source.startswith("measured")


def test_links_of_a_profile_come_first_and_are_read_again() -> None:
    profile = Profile("cpu", "a machine", "2.13", {}, ranks=LINKS)
    assert links_between_ranks("h100", "", profile) == LINKS
    assert Profile.from_json(profile.to_json()) == profile
    wrong = msgspec.structs.replace(profile, ranks=msgspec.structs.replace(LINKS, inside_gb_s=0))
    with pytest.raises(ProfileError, match="between ranks"):
        Profile.from_json(wrong.to_json())
