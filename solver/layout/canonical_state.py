"""The moving parts of the canonical search: what a placement changes, and how it is undone.

Written for NumPy and for Numba alike. `FLOORS` alone is written twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.solver.layout.boxes import Ints
from remat.solver.layout.jit import compiled, loops_or_arrays
from remat.solver.layout.sections import Sections

UNPLACED = -1
NO_OFFSET = 1 << 62


class State(NamedTuple):
    """Arrays that the search changes in place.

    `offsets` of what is placed, else `UNPLACED`; the `least` offset that each box can still have;
    of each section the `floor` below which nothing more can lie, and `left`, the bytes that it
    still gets; how many unplaced boxes are `crossing` into the next section; the offsets `found`.
    """

    offsets: Ints
    least: Ints
    floor: Ints
    left: Ints
    crossing: Ints
    found: Ints


class Undo(NamedTuple):
    """What a placement changed: boxes `raised` from `old` offsets, and `floors` from `first` on."""

    raised: Ints
    old: Ints
    first: int
    floors: Ints
    is_topmost: bool


def initial(sections: Sections) -> State:
    """Nothing is placed."""
    n, n_sections = len(sections.size), len(sections.member_at) - 1
    return State(
        np.full(n, UNPLACED, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n_sections, np.int64),
        sections.totals.copy(),
        sections.crossings.copy(),
        np.full(n, UNPLACED, np.int64),
    )


def _least_in_loops(sections: Sections, state: State, first: int, last: int) -> Ints:
    """The least offset of what is unplaced in each section; `NO_OFFSET` where nothing is."""
    least = np.full(last - first, NO_OFFSET, np.int64)
    for s in range(first, last):
        for k in range(sections.member_at[s], sections.member_at[s + 1]):
            box = sections.members[k]
            if state.offsets[box] < 0 and state.least[box] < least[s - first]:
                least[s - first] = state.least[box]
    return least


def _least_in_arrays(sections: Sections, state: State, first: int, last: int) -> Ints:
    at = sections.member_at[first : last + 1]
    boxes = sections.members[at[0] : at[-1]]
    least = np.where(state.offsets[boxes] < 0, state.least[boxes], NO_OFFSET)
    return np.minimum.reduceat(least, at[:-1] - at[0])


FLOORS = loops_or_arrays(_least_in_loops, _least_in_arrays)


@compiled
def put(sections: Sections, state: State, box: int, first: int, last: int) -> Undo:
    """Place `box` as low as it can lie; floors of sections from `first` to `last` follow."""
    top = state.least[box] + sections.size[box]
    near = sections.overlaps[sections.overlap_at[box] : sections.overlap_at[box + 1]]
    near = near[state.offsets[near] < 0]
    raised = near[state.least[near] < top]
    old = state.least[raised]
    low, high = sections.low[box], sections.high[box]
    a, b = low, high
    if raised.size:
        a = max(min(low, sections.low[raised].min()), first)
        b = min(max(high, sections.high[raised].max()), last)
    undo = Undo(raised, old, a, state.floor[a:b].copy(), near.size == 0)
    state.offsets[box] = state.least[box]
    state.least[raised] = top
    state.floor[low:high] = top
    state.left[low:high] -= sections.size[box]
    state.crossing[low : high - 1] -= 1
    least = FLOORS(sections, state, a, b)
    raises = (least < NO_OFFSET) & (least > state.floor[a:b])
    state.floor[a:b] = np.where(raises, least, state.floor[a:b])
    return undo


@compiled
def take_back(sections: Sections, state: State, box: int, undo: Undo) -> None:
    """As it was before `put`."""
    low, high = sections.low[box], sections.high[box]
    state.floor[undo.first : undo.first + undo.floors.size] = undo.floors
    state.left[low:high] += sections.size[box]
    state.crossing[low : high - 1] += 1
    state.least[undo.raised] = undo.old
    state.offsets[box] = UNPLACED


@compiled
def overflows(sections: Sections, state: State, box: int, capacity: int) -> bool:
    """Whether `box` at its least offset leaves too little in a section of its own: a quick look."""
    low, high = sections.low[box], sections.high[box]
    return state.left[low:high].max() > capacity - state.least[box]


@compiled
def is_topmost(sections: Sections, state: State, box: int) -> bool:
    """Whether nothing that is unplaced shares a section with `box`."""
    near = sections.overlaps[sections.overlap_at[box] : sections.overlap_at[box + 1]]
    return (state.offsets[near] >= 0).all()


@compiled
def fits(state: State, offset: int, first: int, last: int, capacity: int) -> bool:
    """Whether each section can still hold what it gets, nothing of it below `offset`."""
    floor = np.maximum(state.floor[first:last], offset)
    return not (floor + state.left[first:last] > capacity).any()


@compiled
def candidates(sections: Sections, state: State, boxes: Ints, offset: int, rank: int) -> Ints:
    """Positions in `boxes` of what may be placed next, the lowest first.

    Placements come by offset, and at one offset by rank, so that each layout is met once. A box
    that leaves room for another below it is none: the other could be placed first.
    """
    least = state.least[boxes]
    ceiling = (least + sections.size[boxes]).min()
    later = (least > offset) | ((least == offset) & (np.arange(boxes.size) >= rank))
    may = np.flatnonzero(later & (least < ceiling))
    return may[np.argsort(least[may], kind="mergesort")]
