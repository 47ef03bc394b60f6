"""The choice among plans of pieces, against every other choice; graphs with neighbours."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.compile.piece_choice import Option, fastest, least_room, peak_of, with_neighbours
from remat.compile.pieces import Piece
from remat.solver.store_all import StoreAll
from tests.solver.random_graphs import MIB, chain

options = st.builds(
    lambda left, over, us: Option(None, left + over, left, float(us)),
    st.integers(0, 6), st.integers(0, 6), st.integers(0, 6),
)  # fmt: skip
pieces = st.lists(st.lists(options, min_size=1, max_size=3), min_size=1, max_size=4)


def by_hand(chosen: tuple[Option, ...], other_calls: int) -> int:
    """The peak of a choice: each piece runs on what those before it have left."""
    left = [option.left_bytes for option in chosen]
    peaks = [sum(left[:k]) + option.peak_bytes for k, option in enumerate(chosen)]
    return max(peaks) + other_calls * sum(left)


@settings(max_examples=200)
@given(pieces, st.integers(0, 30), st.integers(0, 2))
def test_no_other_choice_is_faster(
    known: list[list[Option]], room_bytes: int, other_calls: int
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


def piece(**sizes: int) -> Piece:
    step: Any = SimpleNamespace()
    return Piece(step, **{"outputs_bytes": 0, "beside_bytes": 0, "after_bytes": 0, **sizes})


def test_neighbours_are_live_through_backward_and_limit_what_is_saved() -> None:
    graph = chain(6)
    plain = StoreAll().solve(graph, 1 << 40)
    beside = with_neighbours(graph, piece(beside_bytes=MIB), 0, 0)
    assert beside.hash == graph.hash
    in_backward = StoreAll().solve(beside, 1 << 40)
    assert plain.peak_bytes < in_backward.peak_bytes <= plain.peak_bytes + MIB
    limited = with_neighbours(graph, piece(), 10**9, 0)
    assert StoreAll().solve(limited, 1 << 40).peak_bytes > 10**9, "everything is saved"
    free = with_neighbours(graph, piece(), plain.peak_bytes, plain.peak_bytes)
    assert StoreAll().solve(free, 1 << 40).peak_bytes == plain.peak_bytes


@pytest.mark.parametrize("room_bytes", [0, 9])
def test_nothing_fits(room_bytes: int) -> None:
    assert fastest([[Option(None, 10, 0)]], room_bytes) is None
