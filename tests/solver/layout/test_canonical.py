"""The canonical search against all orders of few boxes, and its two forms against each other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layouts import CHIP_PREORDERS, fit_into
from remat.schedules.layout import Buffers
from remat.solver.layout import canonical
from remat.solver.layout.boxes import Boxes, overlaps_in, range_maxima, sections_of
from remat.solver.layout.canonical import FAILED, FOUND, OUT_OF_TRIES, CanonicalSearch, Preorder
from remat.solver.layout.placing import STEP_PREORDERS, dive
from tests.solver.layout.random_boxes import (
    cut_rectangle,
    least_arena_bytes,
    overlaps,
    random_buffers,
)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30))
def test_it_finds_a_layout_where_one_exists_and_proves_that_none_does(seed: int) -> None:
    source = random.Random(seed)
    buffers = random_buffers(source, source.randint(1, 6), 6, 6)
    boxes, least = Boxes.of(buffers, 1), least_arena_bytes(buffers)
    search = CanonicalSearch(boxes)
    for preorder in {*STEP_PREORDERS, *CHIP_PREORDERS}:
        outcome, offsets, _ = search.run(least, preorder, 1 << 30)
        assert outcome == FOUND
        assert boxes.top(offsets) == least
        assert not overlaps(boxes, offsets)
        assert search.run(least - 1, preorder, 1 << 30)[0] == FAILED


def test_it_ends_after_its_tries() -> None:
    boxes = Boxes.of(random_buffers(random.Random(3), 40, 50, 20), 1)
    outcome, _, tries = CanonicalSearch(boxes).run(boxes.load, Preorder("WAT"), 10)
    assert (outcome, tries) == (OUT_OF_TRIES, 10)
    found = dive(CanonicalSearch(boxes), boxes.load, 10, 10_000)
    assert (found.offsets, found.tries) == (None, 70)
    found = dive(CanonicalSearch(boxes), boxes.load, 10, 15)
    assert (found.offsets, found.tries) == (None, 15)


def test_searches_in_turn_use_their_tries_up_and_no_more() -> None:
    boxes = Boxes.of(cut_rectangle(6, 30), 1)
    found = fit_into(boxes, boxes.load, 100)
    assert found.offsets is None
    assert not found.is_proved
    assert found.tries == 100


def test_that_nothing_fits_below_the_load_is_proved_at_once() -> None:
    boxes = Boxes.of(random_buffers(random.Random(3), 40, 50, 20), 1)
    found = fit_into(boxes, boxes.load - 1, 5000)
    assert found.offsets is None
    assert found.is_proved


def test_sections_hold_what_is_live_together() -> None:
    boxes = Boxes.of(Buffers.of_arrays([1, 2, 4, 8], [0, 1, 3, 9], [3, 9, 5, 10]), 1)
    sections = sections_of(boxes)
    rows = np.split(sections.members, sections.member_at[1:-1])
    assert [row.tolist() for row in rows] == [[0, 1], [1, 2], [3]]
    assert sections.totals.tolist() == [3, 6, 8]
    assert sections.crossings.tolist() == [1, 0, 0]
    assert overlaps_in(boxes) == len(sections.overlaps) == 4
    near = np.split(sections.overlaps, sections.overlap_at[1:-1])
    assert [row.tolist() for row in near] == [[1], [0, 2], [1], []]


@given(st.integers(0, 1 << 30))
def test_floors_in_loops_and_in_arrays_are_equal(seed: int) -> None:
    source = np.random.default_rng(seed)
    boxes = Boxes.of(random_buffers(random.Random(seed), 20, 9, 12), 1)
    sections = sections_of(boxes)
    state = canonical.initial(sections)
    state[canonical.LEAST][:] = source.integers(0, 50, 20)
    state[canonical.LEAST][source.random(20) < 0.4] = canonical.PLACED
    last = len(sections.member_at) - 1
    for first in range(last):
        loops, arrays = (
            form(tuple(sections), state, first, last)
            for form in (canonical.least_in_loops, canonical.least_in_arrays)
        )
        assert loops.tolist() == arrays.tolist()


@given(st.integers(0, 1 << 30))
def test_range_maxima(seed: int) -> None:
    source = np.random.default_rng(seed)
    numbers = source.integers(0, 100, source.integers(1, 40))
    start = source.integers(0, numbers.size, 30)
    end = source.integers(start + 1, numbers.size + 1)
    plain = [int(numbers[a:b].max()) for a, b in zip(start, end, strict=True)]
    assert range_maxima(numbers, start, end).tolist() == plain


@pytest.mark.slow
def test_compiled_and_plain_searches_find_the_same() -> None:
    pytest.importorskip("numba")
    import subprocess
    import sys

    code = (
        "import sys, random\n"
        "if sys.argv[1] == 'plain': sys.modules['numba'] = None\n"
        "import remat\n"
        "from remat.solver.layout import boxes as jit\n"
        "from remat.solver.layout.boxes import Boxes\n"
        "from benchmarks.layouts import fit_into\n"
        "from tests.solver.layout.random_boxes import random_buffers\n"
        "assert jit.IS_COMPILED == (sys.argv[1] != 'plain')\n"
        "for seed in range(6):\n"
        "    boxes = Boxes.of(random_buffers(random.Random(seed), 40, 50, 20), 1)\n"
        "    found = fit_into(boxes, int(1.04 * boxes.load), 4000)\n"
        "    print(found.tries, found.preorder, found.offsets)\n"
    )
    plain, fast = (
        subprocess.run(
            [sys.executable, "-c", code, how], capture_output=True, text=True, check=True
        )
        for how in ("plain", "compiled")
    )
    assert plain.stdout == fast.stdout
    assert "[" in plain.stdout, "some are found"
