"""Tables of equal blocks: what they allow fits, and is the best but for a step of the grid."""

from __future__ import annotations

import random

import numpy as np
import pytest

from remat.cluster.parts import EqualBlocks, Limit, PartOption
from tests.remat.cluster.exhaustive_borders import exhaustive_extra_us


def random_options(rng: random.Random) -> list[PartOption]:
    count = rng.randint(2, 6)
    return [
        PartOption(
            rng.randint(50, 2000) << 20, rng.randint(50, 900) << 20, i and rng.uniform(1, 100)
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.parametrize("n_limits", [1, 2])
def test_least_time_is_that_of_exhaustive_search_but_for_a_step(seed: int, n_limits: int) -> None:
    rng = random.Random(seed)
    options = random_options(rng)
    blocks = rng.randint(1, 5)
    rooms = [(rng.randint(500, 30000) << 20, rng.randint(1, 4)) for _ in range(n_limits)]
    limits = [Limit(np.array([room]), flight) for room, flight in rooms]
    tables = EqualBlocks(options, 6)
    found = float(tables.least_us(np.array([blocks]), limits)[0])
    less = [(room - flight * tables.unit_bytes * (blocks + 1), flight) for room, flight in rooms]
    assert exhaustive_extra_us(options, blocks, rooms) - 1e-9 <= found
    assert found <= exhaustive_extra_us(options, blocks, less) + 1e-9
    if np.isfinite(found):
        chosen = tables.chosen(blocks, limits)
        taken = [options[i] for i, n in chosen.items() for _ in range(n)]
        assert len(taken) == blocks
        assert sum(o.extra_us for o in taken) == pytest.approx(found)
        saved = sum(o.saved_bytes for o in taken)
        need = max(o.need_bytes for o in taken)
        assert all(flight * saved + need <= room for room, flight in rooms)


def test_no_block_needs_no_room() -> None:
    tables = EqualBlocks([PartOption(8, 8, 0.0)], 3)
    limits = [Limit(np.array([0, -1]), 1), Limit(np.array([0, 0]), 2)]
    assert tables.least_us(np.array([0, 0]), limits).tolist() == [0.0, np.inf]
    assert tables.chosen(0, limits) == {}


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="2 blocks do not fit 10 bytes"):
        EqualBlocks([PartOption(8, 8, 0.0)], 3).chosen(2, [Limit(np.array([10]), 1)])
