"""All ways to cut a chain into stages, and all ways for blocks to take options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from remat.cluster.parts import PartOption


def exhaustive_time_us(times_us: npt.NDArray[np.float64], layers: int, microbatches: int) -> float:
    """The least Σ t + (m - 1) max t of all cuts; inf where none fits."""
    stages = len(times_us)
    best = float("inf")
    for cut in itertools.combinations(range(1, layers), stages - 1):
        counts = np.diff([0, *cut, layers])
        taken = [float(times_us[s, n]) for s, n in enumerate(counts)]
        best = min(best, sum(taken) + (microbatches - 1) * max(taken))
    return best


def exhaustive_extra_us(
    options: Sequence[PartOption], blocks: int, limits: Sequence[tuple[float, float]]
) -> float:
    """The least extra time of so many blocks; inf where nothing fits.

    Parameters
    ----------
    limits : rooms in bytes, each with the microbatches in flight.
    """
    best = float("inf")
    for combo in itertools.combinations_with_replacement(options, blocks):
        saved, need = sum(o.saved_bytes for o in combo), max(o.need_bytes for o in combo)
        if all(in_flight * saved + need <= room_bytes for room_bytes, in_flight in limits):
            best = min(best, sum(o.extra_us for o in combo))
    return best
