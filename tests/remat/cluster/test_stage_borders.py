"""Stage borders: the best of all, whatever each stage takes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from remat.cluster.planner import best_borders
from tests.remat.cluster.exhaustive_borders import exhaustive_time_us


@pytest.mark.parametrize("seed", range(400))
def test_borders_equal_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    stages, layers = rng.randint(1, 4), rng.randint(4, 9)
    microbatches = rng.randint(1, 12)
    times = np.full((stages, layers + 1), np.inf)
    for s, n in itertools.product(range(stages), range(1, layers + 1)):
        if rng.random() > 0.15:
            times[s, n] = rng.uniform(0.5, 1.5) * n + rng.random()
    best = exhaustive_time_us(times, layers, microbatches)
    found = best_borders(times, layers, microbatches)
    if found is None:
        assert best == np.inf
        return
    assert found.time_us == pytest.approx(best)
    assert sum(found.layers) == layers
    taken = [times[s, n] for s, n in enumerate(found.layers)]
    assert sum(taken) + (microbatches - 1) * max(taken) == pytest.approx(found.time_us)


def test_borders_are_those_of_least_index_in_every_run() -> None:
    times = np.array([[np.inf, 1.0, 2.0, 3.0]] * 2)
    assert {best_borders(times, 3, 4) for _ in range(3)} == {best_borders(times, 3, 4)}
