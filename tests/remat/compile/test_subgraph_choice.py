"""The choice among plans of subgraphs, against every other choice; graphs with neighbours."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.compile.subgraph_choice import (
    SubgraphOption,
    fastest,
    least_room,
    peak_of,
    with_neighbours,
)
from remat.compile.subgraphs import Subgraph
from remat.graph_capture.graph import TANGENTS, Op, Resident, TrainingGraph, Value
from remat.solver.policies.template import StoreAll

options = st.builds(
    lambda left, over, us: SubgraphOption(None, left + over, left, float(us)),
    st.integers(0, 6), st.integers(0, 6), st.integers(0, 6),
)  # fmt: skip
subgraphs = st.lists(st.lists(options, min_size=1, max_size=3), min_size=1, max_size=4)


def by_hand(chosen: tuple[SubgraphOption, ...], other_calls: int) -> int:
    """The peak of a choice: each subgraph runs on what those before it have left."""
    left = [option.left_bytes for option in chosen]
    peaks = [sum(left[:k]) + option.peak_bytes for k, option in enumerate(chosen)]
    return max(peaks) + other_calls * sum(left)


@settings(max_examples=200)
@given(subgraphs, st.integers(0, 30), st.integers(0, 2))
def test_no_other_choice_is_faster(
    known: list[list[SubgraphOption]], room_bytes: int, other_calls: int
) -> None:
    every = list(itertools.product(*known))
    fitting = [one for one in every if by_hand(one, other_calls) <= room_bytes]
    found = fastest(known, room_bytes, other_calls)
    assert (found is None) == (not fitting)
    if found is not None:
        assert peak_of(found, other_calls) == by_hand(found, other_calls) <= room_bytes
        best = min(sum(option.extra_us for option in one) for one in fitting)
        assert sum(option.extra_us for option in found) == best
    assert least_room(known, other_calls) == min(by_hand(one, other_calls) for one in every)


def subgraph(**sizes: int) -> Subgraph:
    step: Any = SimpleNamespace()
    return Subgraph(step, **{"outputs_bytes": 0, "beside_bytes": 0, "after_bytes": 0, **sizes})


def two_layers() -> TrainingGraph:
    """Forward makes `a` and the result `b`; backward opens, then reads `a`."""
    values = (
        Value("x", 0, "", "input", "uint8", ()),
        Value("a", 100, "make_a", "activation", "uint8", (100,)),
        Value("b", 10, "make_b", "output", "uint8", (10,)),
        Value("t", 10, "tangents", "tangent", "uint8", (10,)),
        Value("g", 5, "make_g", "gradient", "uint8", (5,)),
    )
    ops = (
        Op("make_a", "a", "forward", ("x",), ("a",), cost_us=1.0),
        Op("make_b", "b", "forward", ("a",), ("b",), cost_us=1.0),
        Op("tangents", TANGENTS, "backward", (), ("t",), no_recompute="they arrive"),
        Op("make_g", "g", "backward", ("a", "t"), ("g",), cost_us=1.0),
    )
    return TrainingGraph(
        name="two", ops=ops, values=values, forward_outputs=("b",), outputs=("b", "g", "t"),
        resident=Resident(),
    )  # fmt: skip


def kept(graph: TrainingGraph) -> int:
    """The peak with everything kept."""
    return StoreAll().solve(graph, 1 << 40).peak_bytes


def test_gradients_beside_a_subgraph_are_live_through_its_backward() -> None:
    graph = two_layers()
    assert kept(graph) == 125
    beside = with_neighbours(graph, subgraph(beside_bytes=1000), 0, 0)
    assert beside.hash == graph.hash, "a plan of one is a plan of the other"
    assert kept(beside) == 1125


def test_what_is_saved_keeps_to_its_limit() -> None:
    graph = two_layers()
    of_b = subgraph(outputs_bytes=10)
    assert kept(with_neighbours(graph, of_b, 500, 100)) == 500, "a just fits"
    assert kept(with_neighbours(graph, of_b, 500, 99)) == 501
    assert kept(with_neighbours(graph, of_b, 125, 125)) == 125, "nothing is to spare"


@pytest.mark.parametrize("room_bytes", [0, 9])
def test_nothing_fits(room_bytes: int) -> None:
    assert fastest([[SubgraphOption(None, 10, 0)]], room_bytes) is None
