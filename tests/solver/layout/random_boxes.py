"""Random buffers, and the least arena of few of them by trying all orders."""

from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import strategies as st

from remat.graph_capture.graph import Ints
from remat.schedules.layout import Buffers
from remat.solver.layout.boxes import Boxes


def random_buffers(source: random.Random, n: int, most_bytes: int, times: int) -> Buffers:
    start = [source.randrange(times) for _ in range(n)]
    size_bytes = [source.randint(1, most_bytes) for _ in range(n)]
    end = [time + source.randint(1, max(times // 2, 1)) for time in start]
    return Buffers.of_arrays(size_bytes, start, end)


@st.composite
def some_buffers(draw: st.DrawFn, most: int = 40) -> Buffers:
    source = random.Random(draw(st.integers(0, 1 << 30)))
    most_bytes = source.choice([3, 50, 5_000_000])
    return random_buffers(source, source.randint(0, most), most_bytes, source.choice([1, 6, 40]))


def cut_rectangle(seed: int, n: int) -> Buffers:
    """A rectangle cut into pieces: one layout at the load is known to exist."""
    source = np.random.default_rng(seed)
    pieces = [(0, 4096, 0, 32)]
    while len(pieces) < n:
        low, high, start, end = pieces.pop(0)
        if source.random() < 0.5 and end - start > 1:
            at = int(source.integers(start + 1, end))
            pieces += [(low, high, start, at), (low, high, at, end)]
        else:
            at = int(source.integers(low + 1, high))
            pieces += [(low, at, start, end), (at, high, start, end)]
    low, high, start, end = np.array(pieces).T
    return Buffers.of_arrays(high - low, start, end)


def recomputing_net(seed: int, layers: int, slots: int, unit_bytes: int) -> Buffers:
    """A chain of equal layers, computed again from checkpoints in at most so many nested splits.

    Each op's output is live until the next has run, or until its backward where it is kept; half
    of backward's ops leave a gradient until the end of the step.
    """
    source = random.Random(seed)
    sizes = [source.choice([1, 4, 4, 16, 32]) * unit_bytes for _ in range(source.randint(5, 10))]
    rows: list[list[int]] = []
    now = 0

    def forward(first: int, last: int) -> None:
        nonlocal now
        for _ in range(first, last):
            rows.extend([size, now + k, now + k + 2] for k, size in enumerate(sizes))
            now += len(sizes)

    def layer() -> None:
        nonlocal now
        end = now + 2 * len(sizes)
        rows.extend([size, now + k, end - k] for k, size in enumerate(sizes))
        now += len(sizes)
        for k, size in enumerate(reversed(sizes)):
            rows.append([size, now, now + 2])
            if k % 2:
                rows.append([unit_bytes // 4, now, -1])
            now += 1

    def backward(first: int, last: int, left: int) -> None:
        if last - first == 1:
            layer()
            return
        middle = last - 1 if left == 0 else first + max(1, 2 * (last - first) // 5)
        forward(first, middle)
        begun = now
        backward(middle, last, max(left - 1, 0))
        rows.append([sizes[-1], begun - 1, now])
        backward(first, middle, left)

    backward(0, layers, slots)
    size_bytes, start, end = np.array(rows, np.int64).T
    return Buffers.of_arrays(size_bytes, start, np.where(end < 0, now, np.minimum(end, now)))


def least_arena_bytes(buffers: Buffers) -> int:
    """Any layout, read from the bottom up, is an order in which each falls onto those before."""
    rows = list(zip(buffers.size_bytes, buffers.start, buffers.end, strict=True))
    return min(
        (_height(order) for order in itertools.permutations(rows)),
        default=0,
    )


def _height(rows: tuple[tuple[int, int, int], ...]) -> int:
    tops: list[tuple[int, int, int]] = []
    for size, start, end in rows:
        below = [top for top, first, last in tops if first < end and start < last]
        tops.append((max(below, default=0) + int(size), start, end))
    return max((top for top, _, _ in tops), default=0)


def overlaps(boxes: Boxes, offsets: Ints) -> bool:
    """Whether two boxes share a byte at some time."""
    rows = list(zip(offsets, offsets + boxes.size, boxes.start, boxes.end, strict=True))
    return any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]
        for i, a in enumerate(rows)
        for b in rows[:i]
    )
