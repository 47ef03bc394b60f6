"""Which links a step's collectives are costed over, and what each of them moves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.devices.known_devices import links_between_ranks
from remat.graph_capture.devices.links import RankLinks, Traffic
from remat.graph_capture.distributed.collective_costs import (
    RANKS_OF_NODE,
    links_of_step,
    traffic_of,
)
from remat.graph_capture.distributed.collectives import FakeGroups, collectives_in, fake_ranks
from remat.graph_capture.errors import ProfileError

LINKS = RankLinks(100.0, 10.0, 20.0, 40.0, 4.0, 1.25, "made up")


def test_links_of_a_profile_come_first_and_are_read_again() -> None:
    profile = Profile("cpu", "a machine", "2.13", {}, ranks=LINKS)
    assert links_of_step("h100", "", profile) == LINKS
    assert Profile.from_json(profile.to_json()) == profile
    wrong = msgspec.structs.replace(profile, ranks=msgspec.structs.replace(LINKS, inside_gb_s=0))
    with pytest.raises(ProfileError, match="between ranks"):
        Profile.from_json(wrong.to_json())


def test_torchrun_says_how_many_ranks_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links_of_step("h100", "") == links_between_ranks("h100")
    monkeypatch.setenv(RANKS_OF_NODE, "4")
    assert links_of_step("h100", "").node_size == 4


def gathered(x: Tensor, group: Any) -> Tensor:
    return functional.all_gather_tensor(x, 0, group)


def scattered(x: Tensor, group: Any) -> Tensor:
    return functional.reduce_scatter_tensor(x, "sum", 0, group)


def reduced(x: Tensor, group: Any) -> Tensor:
    return functional.all_reduce(x, "sum", group)


def exchanged(x: Tensor, group: Any) -> Tensor:
    return functional.all_to_all_single(x, None, None, group)


def sent_on(x: Tensor, group: Any) -> Tensor:
    n = dist.get_world_size(group)
    return functional.permute_tensor(x, [(i + 1) % n for i in range(n)], group)


def sent_to_all(x: Tensor, group: Any) -> Tensor:
    return functional.broadcast(x, 0, group)


def node_of(run: Any, groups: FakeGroups, ranks: int, apart: int) -> fx.Node:
    group = groups.group(ranks, apart)
    graph = make_fx(lambda x: run(x, group), tracing_mode="fake")(torch.ones(1024))
    return collectives_in(graph)[0]


@pytest.mark.parametrize(
    ("run", "kind", "whole_bytes"),
    [
        (gathered, "all_gather", 16 * 4096), (scattered, "reduce_scatter", 4096),
        (reduced, "all_reduce", 4096), (exchanged, "all_to_all", 4096), (sent_on, "send", 4096),
        (sent_to_all, "send", 4096),
    ],
)  # fmt: skip
def test_a_collective_moves_its_whole_tensor(run: Any, kind: Any, whole_bytes: int) -> None:
    with fake_ranks(64) as groups:
        node = node_of(run, groups, 16, 1)
        assert traffic_of(node, 8) == Traffic(kind, whole_bytes, 16, 8)


@pytest.mark.parametrize(("ranks", "apart"), [(2, 1), (8, 1), (16, 1), (4, 2), (8, 4), (4, 16)])
def test_a_group_of_a_trace_has_the_cost_of_ranks_that_lie_so(ranks: int, apart: int) -> None:
    with fake_ranks(64) as groups:
        traffic = traffic_of(node_of(reduced, groups, ranks, apart), LINKS.node_size)
    expected = LINKS.us("all_reduce", traffic.whole_bytes, ranks, apart)
    assert LINKS.collective_us(traffic) == pytest.approx(expected)
