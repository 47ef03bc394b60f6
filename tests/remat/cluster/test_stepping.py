"""How many receive buffers serve all microbatches of a step."""

from __future__ import annotations

import numpy as np
import pytest

from remat.cluster.stepping import ring_size


def clash(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether two microbatches use one buffer of a ring at the same step."""
    users: set[tuple[int, int]] = set()
    for i, (first, last) in enumerate(spans):
        for step in range(first, last + 1):
            if (i % size, step) in users:
                return True
            users.add((i % size, step))
    return False


@pytest.mark.parametrize(
    ("spans", "size"),
    [
        ([(0, 0), (1, 1), (2, 2)], 1),
        ([(0, 2), (1, 4), (3, 6), (5, 8)], 2),
        ([(0, 7), (1, 6), (2, 5), (3, 4)], 4),
        ([], 1),
    ],
)
def test_orders_known_by_hand(spans: list[tuple[int, int]], size: int) -> None:
    assert ring_size(spans) == size


@pytest.mark.parametrize("seed", range(60))
def test_no_smaller_ring_serves(seed: int) -> None:
    draw = np.random.default_rng(seed)
    firsts = sorted(int(i) for i in draw.integers(0, 12, 6))
    spans = [(first, first + int(draw.integers(0, 6))) for first in firsts]
    size = ring_size(spans)
    assert not clash(spans, size)
    assert all(clash(spans, less) for less in range(1, size))
