"""Where to cut a chain of blocks into the stages of a 1F1B pipeline.

The time of a step is taken to be Σ t + (m - 1) max t, over the times t of one microbatch on each
stage, forward and backward: the first microbatch goes through all stages, and then the slowest one
sets the pace. It is never below torch's order replayed, and up to 7 % above it where stages are
uneven (`tests/schedules/pipeline`).

Also called: the linear partitioning problem; with two terms as in Alpa (Zheng et al. 2022,
https://arxiv.org/abs/2201.12023), whose inner program this is for one chain.
Optimal. For each candidate M of max t, from the least feasible up, a program over (stage, blocks so
far) gives the least sum with t ≤ M. It ends when M alone, with the least sum of all, is no better.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Borders(NamedTuple):
    """Time of all microbatches in µs, and the number of blocks of each stage."""

    time_us: float
    layers: tuple[int, ...]


def best_borders(times_us: Floats, layers: int, microbatches: int) -> Borders | None:
    """The borders of least time; None where no stage may be so long that all blocks have a place.

    Parameters
    ----------
    times_us : of one microbatch, by stage (row) and number of blocks (column, from 0 on); inf where
        that many do not fit.
    """
    loosest = _least_sum(times_us, layers, np.inf)
    if loosest is None:
        return None
    limits = np.unique(times_us[np.isfinite(times_us)])
    best: Borders | None = None
    for limit_us in limits[_first_feasible(times_us, layers, limits) :]:
        if best and (microbatches - 1) * limit_us + loosest.time_us >= best.time_us:
            break
        found = _least_sum(times_us, layers, limit_us)
        assert found is not None
        slowest_us = max(times_us[s, n] for s, n in enumerate(found.layers))
        time_us = float(found.time_us + (microbatches - 1) * slowest_us)
        if best is None or time_us < best.time_us:
            best = Borders(time_us, found.layers)
    return best


def _first_feasible(times_us: Floats, layers: int, limits: Floats) -> int:
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _least_sum(times_us, layers, limits[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _least_sum(times_us: Floats, layers: int, limit_us: float) -> Borders | None:
    """The least sum of times with no stage above the limit."""
    reached = np.full(layers + 1, np.inf)
    reached[0] = 0.0
    picks: list[npt.NDArray[np.int64]] = []
    for row in times_us:
        sums = np.full(layers + 1, np.inf)
        pick = np.zeros(layers + 1, np.int64)
        for n in np.flatnonzero(row <= limit_us):
            if np.isfinite(row[n]):
                _put_blocks(sums, pick, reached, int(n), row[n])
        reached = sums
        picks.append(pick)
    if not np.isfinite(reached[layers]):
        return None
    at, chosen = layers, list[int]()
    for pick in reversed(picks):
        chosen.append(int(pick[at]))
        at -= chosen[-1]
    return Borders(float(reached[layers]), tuple(reversed(chosen)))


def _put_blocks(
    sums: Floats, pick: npt.NDArray[np.int64], reached: Floats, blocks: int, time_us: float
) -> None:
    """Let a stage have so many blocks, wherever that is better."""
    with_these = reached[: len(reached) - blocks] + time_us
    better = with_these < sums[blocks:]
    sums[blocks:][better] = with_these[better]
    pick[blocks:][better] = blocks
