"""Guesses of `fit` from two captures of one step at two sizes.

Bytes are affine in the size of a batch, so a graph at any other size follows from two captures
(`graph_capture/derived/between_sizes.py`). Prices do not follow as exactly: near the limit an
overhead hangs on what ops were measured to take, so `fit` only guesses with these.
"""

from __future__ import annotations

from collections.abc import Mapping

from remat.budgets import unmodified
from remat.graph_capture.derived.between_sizes import is_same_step
from remat.graph_capture.graph import TrainingGraph

Pair = tuple[tuple[int, TrainingGraph], tuple[int, TrainingGraph]]
"""Two sizes, each with its graph."""


def pair_near(
    graphs: Mapping[int, TrainingGraph], near: int, fails: int | None = None
) -> Pair | None:
    """Two captures of the same step, to guess between or beyond; None where no two are.

    `near` and `fails`, what holds and what does not, if both were captured. Otherwise the size that
    is nearest to `near`, and the next one that is a quarter away from it or more.
    """

    def pair(one: int, other: int) -> Pair | None:
        if not is_same_step(graphs[one], graphs[other]):
            return None
        return (one, graphs[one]), (other, graphs[other])

    if near in graphs and fails is not None and (found := pair(near, fails)):
        return found
    by_distance = sorted(graphs, key=lambda size: abs(size - near))
    one = by_distance[0]
    # A line through two sizes that are close magnifies what differs between two measurements.
    away = (other for other in by_distance if other != one and abs(other - one) * 4 >= one)
    return next((found for other in away if (found := pair(one, other))), None)


def unmodified_reaches(pair: Pair, budget_bytes: int) -> int:
    """The largest size whose unmodified step fits, by the line through both peaks; 0 for none."""
    (size, first), (other, second) = pair
    here, there = unmodified(first).peak_bytes, unmodified(second).peak_bytes
    slope = (there - here) / (other - size)
    return int(size + (budget_bytes - here) / slope) if slope > 0 else 0
