"""Memory by addresses: windows, placement and holes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from remat.baselines.evictions import HOLE, AddressSpace, HoleFit, cheapest_window
from remat.solver.policies.eviction import ByteCount


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 2, 5, None])), max_size=12),
    st.integers(1, 30),
)
def test_cheapest_window_equals_brute_force(
    spans: list[tuple[int, int | None]], asked_bytes: int
) -> None:
    sizes = [size for size, _ in spans]
    costs = [float("inf") if cost is None else float(cost) for _, cost in spans]
    every = [
        sum(costs[first:last])
        for first in range(len(spans))
        for last in range(first + 1, len(spans) + 1)
        if sum(sizes[first:last]) >= asked_bytes
    ]
    least = min(every, default=float("inf"))
    window = cheapest_window(sizes, costs, asked_bytes)
    if window is None:
        assert least == float("inf")
    else:
        assert sum(costs[slice(*window)]) == least
        assert sum(sizes[slice(*window)]) >= asked_bytes


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 60),
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 20), st.sampled_from(["best", "low", "high"])),
        max_size=60,
    ),
)
def test_arena_never_overlaps_and_loses_no_byte(
    capacity_bytes: int, orders: list[tuple[int, int, HoleFit]]
) -> None:
    arena, sizes = AddressSpace(capacity_bytes, 10), dict[int, int]()
    for block, size_bytes, fit in orders:
        if block in sizes:
            arena.release(block)
            del sizes[block]
        else:
            largest = max((s for _, s, owner in arena.spans() if owner == HOLE), default=0)
            fits = arena.place(block, size_bytes, fit)
            assert fits == (size_bytes <= largest)
            if fits:
                sizes[block] = size_bytes
        check_arena(arena, capacity_bytes, sizes)


def check_arena(arena: AddressSpace, capacity_bytes: int, sizes: dict[int, int]) -> None:
    spans = list(arena.spans())
    ends = [0, *(start + size_bytes for start, size_bytes, _ in spans)]
    assert [start for start, _, _ in spans] == ends[:-1]
    assert ends[-1] == capacity_bytes
    owners = [owner for _, _, owner in spans]
    assert not any(a == b == HOLE for a, b in pairwise(owners))
    present = {owner: size_bytes for _, size_bytes, owner in spans if owner != HOLE}
    assert present == {block: size for block, size in sizes.items() if size}
    holes = [0, *(size if owner == HOLE else 0 for _, size, owner in spans), 0]
    for i, (start, _, owner) in enumerate(spans):
        if owner != HOLE:
            assert arena.at[owner] == start
            assert arena.beside_bytes[owner] == holes[i] + holes[i + 2]


def test_arena_fits() -> None:
    arena = AddressSpace(20, 6)
    assert all(arena.place(block, size, "low") for block, size in enumerate((5, 2, 3, 2, 8)))
    arena.release(0)
    arena.release(2)
    assert not arena.place(5, 6)
    assert arena.place(5, 3, "best")
    assert arena.at[5] == 7
    arena.release(5)
    assert arena.place(5, 3, "low")
    assert arena.at[5] == 0
    arena.release(5)
    assert arena.place(5, 2, "high")
    assert arena.at[5] == 8
    count = ByteCount(20)
    assert count.place(0, 15)
    assert not count.place(1, 6)
    count.release(0)
    assert count.place(1, 6)
