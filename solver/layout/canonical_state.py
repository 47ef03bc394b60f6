"""The moving parts of the canonical search: what a placement changes, and how it is undone.

Written for NumPy and for Numba alike. `FLOORS` alone is written twice.
"""

from __future__ import annotations

import numpy as np

from remat.solver.layout.boxes import Ints
from remat.solver.layout.jit import compiled, loops_or_arrays
from remat.solver.layout.sections import Sections

PLACED = 1 << 62
"""Above all offsets, so that a least offset among boxes is that of the unplaced ones."""

Arrays = tuple[Ints, ...]
Undo = tuple[Ints, Ints, int, Ints, int, bool]
"""What a placement changed: boxes that it raised, and their least offsets before; the first of the
sections whose floors it changed, and those before; its offset; whether nothing is left above it."""

# Plain tuples, since Numba keeps classes by name in its files, which outlive a release of ours.
SIZE, LOW, HIGH, OVERLAP_AT, OVERLAPS, MEMBER_AT, MEMBERS = range(7)
"""Where the fields of `Sections` stand in a plain tuple of them."""
LEAST, FLOOR, LEFT, CROSSING, SOLVED = range(5)
"""Where the arrays that the search changes stand in its state.

The `LEAST` offset that each box can still have, or `PLACED`; of each section the `FLOOR`, below
which nothing more can lie, and `LEFT`, the bytes that it still gets; how many unplaced boxes are
`CROSSING` into the next section; and the offsets that are `SOLVED`.
"""


def initial(sections: Sections) -> Arrays:
    """Nothing is placed."""
    n, n_sections = len(sections[SIZE]), len(sections[MEMBER_AT]) - 1
    return (
        np.zeros(n, np.int64),
        np.zeros(n_sections, np.int64),
        sections.totals.copy(),
        sections.crossings.copy(),
        np.zeros(n, np.int64),
    )


def least_in_loops(sections: Arrays, state: Arrays, first: int, last: int) -> Ints:
    """The least offset of what is unplaced in each section; `PLACED` where nothing is."""
    least = np.full(last - first, PLACED, np.int64)
    for s in range(first, last):
        for k in range(sections[MEMBER_AT][s], sections[MEMBER_AT][s + 1]):
            box = sections[MEMBERS][k]
            least[s - first] = min(least[s - first], state[LEAST][box])
    return least


def least_in_arrays(sections: Arrays, state: Arrays, first: int, last: int) -> Ints:
    """The same without a loop."""
    at = sections[MEMBER_AT][first : last + 1]
    boxes = sections[MEMBERS][at[0] : at[-1]]
    return np.minimum.reduceat(state[LEAST][boxes], at[:-1] - at[0])


FLOORS = loops_or_arrays(least_in_loops, least_in_arrays)


@compiled
def put(sections: Arrays, state: Arrays, box: int, first: int, last: int) -> Undo:
    """Place `box` as low as it can lie; floors of sections from `first` to `last` follow."""
    offset = int(state[LEAST][box])
    top = offset + sections[SIZE][box]
    near = sections[OVERLAPS][sections[OVERLAP_AT][box] : sections[OVERLAP_AT][box + 1]]
    raised = near[state[LEAST][near] < top]
    old = state[LEAST][raised]
    low, high = sections[LOW][box], sections[HIGH][box]
    a, b = low, high
    if raised.size:
        a = max(min(low, sections[LOW][raised].min()), first)
        b = min(max(high, sections[HIGH][raised].max()), last)
    floors = state[FLOOR][a:b].copy()
    is_last = bool((state[LEAST][near] == PLACED).all())
    state[LEAST][box] = PLACED
    state[LEAST][raised] = top
    state[FLOOR][low:high] = top
    state[LEFT][low:high] -= sections[SIZE][box]
    state[CROSSING][low : high - 1] -= 1
    least = FLOORS(sections, state, a, b)
    raises = (least < PLACED) & (least > state[FLOOR][a:b])
    state[FLOOR][a:b] = np.where(raises, least, state[FLOOR][a:b])
    return raised, old, int(a), floors, offset, is_last


@compiled
def take_back(sections: Arrays, state: Arrays, box: int, undo: Undo) -> None:
    """As it was before `put`."""
    low, high = sections[LOW][box], sections[HIGH][box]
    raised, old, first, floors, offset, _ = undo
    state[FLOOR][first : first + floors.size] = floors
    state[LEFT][low:high] += sections[SIZE][box]
    state[CROSSING][low : high - 1] += 1
    state[LEAST][raised] = old
    state[LEAST][box] = offset


@compiled
def overflows(sections: Arrays, state: Arrays, box: int, capacity: int) -> bool:
    """Whether `box` at its least offset leaves too little in a section of its own: a quick look."""
    low, high = sections[LOW][box], sections[HIGH][box]
    return state[LEFT][low:high].max() > capacity - state[LEAST][box]


@compiled
def is_topmost(sections: Arrays, state: Arrays, box: int) -> bool:
    """Whether nothing that is unplaced shares a section with `box`."""
    near = sections[OVERLAPS][sections[OVERLAP_AT][box] : sections[OVERLAP_AT][box + 1]]
    return bool((state[LEAST][near] == PLACED).all())


@compiled
def fits(state: Arrays, offset: int, first: int, last: int, capacity: int) -> bool:
    """Whether each section can still hold what it gets, nothing of it below `offset`."""
    floor = np.maximum(state[FLOOR][first:last], offset)
    return not (floor + state[LEFT][first:last] > capacity).any()


@compiled
def candidates(sections: Arrays, state: Arrays, boxes: Ints, offset: int, rank: int) -> Ints:
    """Positions in `boxes` of what may be placed next, the lowest first.

    Placements come by offset, and at one offset by rank, so that each layout is met once. A box
    that leaves room for another below it is none: the other could be placed first.
    """
    least = state[LEAST][boxes]
    ceiling = (least + sections[SIZE][boxes]).min()
    later = (least > offset) | ((least == offset) & (np.arange(boxes.size) >= rank))
    may = np.flatnonzero(later & (least < ceiling))
    return may[np.argsort(least[may], kind="mergesort")]
