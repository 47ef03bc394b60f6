"""Search over canonical layouts, depth first, as in MiniMalloc.

Source: M. D. Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
Learning", ASPLOS 2023, https://doi.org/10.1145/3623278.3624752. Any layout that fits can be pushed
down and built from the lowest box up: only such are searched, each once. A branch ends where a
section cannot hold what it still gets, or where a gap is left in which another box fits. Where what
is placed splits time into parts, each is solved by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.graph_capture.graph import Floats, Ints
from remat.solver.layout.boxes import (
    Boxes,
    Sections,
    compiled,
    loops_or_arrays,
    range_maxima,
    sections_of,
)

# What a placement changes, and how it is undone, for NumPy and Numba alike but for `_FLOORS`.

PLACED = 1 << 62  # above all offsets: a least offset is that of an unplaced box

_Arrays = tuple[Ints, ...]
_Undo = tuple[Ints, Ints, int, Ints, int, bool]
"""Boxes raised, and their least offsets before; the first section whose floor changed, and the
floors before; the offset; whether nothing is left above."""

# Tuples: Numba's files keep classes by name and outlive a release.
_SIZE, _LOW, _HIGH, _OVERLAP_AT, _OVERLAPS, _MEMBER_AT, _MEMBERS = range(7)  # of `Sections`
# What the search changes. By box: `LEAST` offset, or `PLACED`. By section: `_FLOOR`, below which
# nothing more lies, bytes `LEFT` to it, unplaced boxes `_CROSSING` into the next. Offsets `SOLVED`.
LEAST, _FLOOR, LEFT, _CROSSING, SOLVED = range(5)


def initial(sections: Sections) -> _Arrays:
    n, n_sections = len(sections[_SIZE]), len(sections[_MEMBER_AT]) - 1
    least, floors, solved = (np.zeros(count, np.int64) for count in (n, n_sections, n))
    return least, floors, sections.totals.copy(), sections.crossings.copy(), solved


def least_in_loops(sections: _Arrays, state: _Arrays, first: int, last: int) -> Ints:
    """The least offset of what is unplaced in each section; `PLACED` where nothing is."""
    least = np.full(last - first, PLACED, np.int64)
    for s in range(first, last):
        for k in range(sections[_MEMBER_AT][s], sections[_MEMBER_AT][s + 1]):
            box = sections[_MEMBERS][k]
            least[s - first] = min(least[s - first], state[LEAST][box])
    return least


def least_in_arrays(sections: _Arrays, state: _Arrays, first: int, last: int) -> Ints:
    at = sections[_MEMBER_AT][first : last + 1]
    boxes = sections[_MEMBERS][at[0] : at[-1]]
    return np.minimum.reduceat(state[LEAST][boxes], at[:-1] - at[0])


_FLOORS = loops_or_arrays(least_in_loops, least_in_arrays)


@compiled
def _put(sections: _Arrays, state: _Arrays, box: int, first: int, last: int) -> _Undo:
    """Place `box` as low as it can lie; floors of the sections follow."""
    offset = int(state[LEAST][box])
    top = offset + sections[_SIZE][box]
    near = sections[_OVERLAPS][sections[_OVERLAP_AT][box] : sections[_OVERLAP_AT][box + 1]]
    raised = near[state[LEAST][near] < top]
    old = state[LEAST][raised]
    low, high = sections[_LOW][box], sections[_HIGH][box]
    a, b = low, high
    if raised.size:
        a = max(min(low, sections[_LOW][raised].min()), first)  # floors may rise there
        b = min(max(high, sections[_HIGH][raised].max()), last)
    floors = state[_FLOOR][a:b].copy()
    is_last = bool((state[LEAST][near] == PLACED).all())
    state[LEAST][box] = PLACED
    state[LEAST][raised] = top
    state[_FLOOR][low:high] = top
    state[LEFT][low:high] -= sections[_SIZE][box]
    state[_CROSSING][low : high - 1] -= 1
    least = _FLOORS(sections, state, a, b)
    raises = (least < PLACED) & (least > state[_FLOOR][a:b])
    state[_FLOOR][a:b] = np.where(raises, least, state[_FLOOR][a:b])
    return raised, old, int(a), floors, offset, is_last


@compiled
def _take_back(sections: _Arrays, state: _Arrays, box: int, undo: _Undo) -> None:
    low, high = sections[_LOW][box], sections[_HIGH][box]
    raised, old, first, floors, offset, _ = undo
    state[_FLOOR][first : first + floors.size] = floors
    state[LEFT][low:high] += sections[_SIZE][box]
    state[_CROSSING][low : high - 1] += 1
    state[LEAST][raised] = old
    state[LEAST][box] = offset


@compiled
def _overflows(sections: _Arrays, state: _Arrays, box: int, capacity: int) -> bool:
    """Whether `box` at its least offset leaves too little in one of its sections."""
    low, high = sections[_LOW][box], sections[_HIGH][box]
    return state[LEFT][low:high].max() > capacity - state[LEAST][box]


@compiled
def _is_topmost(sections: _Arrays, state: _Arrays, box: int) -> bool:
    near = sections[_OVERLAPS][sections[_OVERLAP_AT][box] : sections[_OVERLAP_AT][box + 1]]
    return bool((state[LEAST][near] == PLACED).all())


@compiled
def _fits(state: _Arrays, offset: int, first: int, last: int, capacity: int) -> bool:
    """Whether each section can still hold what it gets, nothing of it below `offset`."""
    floor = np.maximum(state[_FLOOR][first:last], offset)
    return not (floor + state[LEFT][first:last] > capacity).any()


@compiled
def _next_candidates(
    sections: _Arrays, state: _Arrays, boxes: Ints, offset: int, rank: int
) -> Ints:
    """Positions in `boxes` of what may be placed next, the lowest first."""
    least = state[LEAST][boxes]
    # A box that leaves room for another below it could come later.
    ceiling = (least + sections[_SIZE][boxes]).min()
    # By offset, then rank, so that each layout is met once.
    later = (least > offset) | ((least == offset) & (np.arange(boxes.size) >= rank))
    may = np.flatnonzero(later & (least < ceiling))
    return may[np.argsort(least[may], kind="mergesort")]  # stable, so that ties keep their rank


OPEN, FOUND, FAILED, OUT_OF_TRIES = 0, 1, 2, 3
_FIRST, _LAST, _NEXT, _PART = 0, 1, 2, 3  # of a frame: sections, next candidate, next part of time


class Preorder(NamedTuple):
    """The keys that boxes are ranked by, the largest first; `widths` are in ranks or in times.
    W idth, A rea, T otal of the fullest section, S tart (latest first), s tart (earliest first)."""

    keys: str
    widths: str = "ranks"


@compiled
def _ranked(sections: _Arrays, state: _Arrays, keys: Floats, total_key: int, boxes: Ints) -> Ints:
    """`boxes` in preorder; `keys[total_key]` is made here, of what is left."""
    boxes = np.sort(boxes)
    for k in range(keys.shape[0] - 1, -1, -1):  # stable sorts, the last key first, rank by all keys
        key = keys[k][boxes]
        if k == total_key:
            for i in range(boxes.size):
                low, high = sections[_LOW][boxes[i]], sections[_HIGH][boxes[i]]
                key[i] = state[LEFT][low:high].max()
        boxes = boxes[np.argsort(-key, kind="mergesort")]
    return boxes


@compiled
def _falls_apart(sections: _Arrays, state: _Arrays, box: int) -> bool:
    """Whether nothing that is left crosses some section's end that `box` crosses."""
    return (state[_CROSSING][sections[_LOW][box] : sections[_HIGH][box] - 1] == 0).any()


@compiled
def _next_part(sections: _Arrays, state: _Arrays, box: int, first: int, last: int) -> int:
    """Where the part of time from `first` on ends, after `box` was placed across it."""
    end = first + 1
    while end < last:
        is_crossed_by_box = sections[_LOW][box] < end and end < sections[_HIGH][box]
        if is_crossed_by_box and state[_CROSSING][end - 1] == 0:
            break
        end += 1
    return end


@compiled
def _inside(sections: _Arrays, boxes: Ints, box: int, first: int, last: int) -> Ints:
    is_in = (sections[_LOW][boxes] < last) & (sections[_HIGH][boxes] > first) & (boxes != box)
    return boxes[is_in]


@compiled
def _search(
    sections: _Arrays, state: _Arrays, keys: Floats, total_key: int, boxes: Ints,
    first: int, last: int, capacity: int, tries: int,
) -> tuple[int, int]:  # fmt: skip
    """Place `boxes` in these sections; how it ended, and the placements tried."""
    # A stack by hand: functions that call themselves cannot be cached. A frame has boxes to place.
    frames = np.zeros((boxes.size + 1, 4), np.int64)
    frames[0, _FIRST], frames[0, _LAST] = first, last
    boxes_at = [boxes]
    todo_at = [_next_candidates(sections, state, boxes, 0, 0)]
    undo_at: list[_Undo] = []
    used, outcome = 0, OPEN
    while len(boxes_at) > 0:
        depth = len(boxes_at) - 1
        frame, here, todo = frames[depth], boxes_at[depth], todo_at[depth]
        if len(undo_at) > depth:
            box = int(here[todo[frame[_NEXT] - 1]])
            if outcome == FOUND and frame[_PART] < frame[_LAST]:
                begin = frame[_PART]
                frame[_PART] = _next_part(sections, state, box, begin, frame[_LAST])
                part = _inside(sections, here, box, begin, frame[_PART])
                if part.size > 0:
                    part = _ranked(sections, state, keys, total_key, part)
                    frames[depth + 1] = np.array([begin, frame[_PART], 0, 0])
                    boxes_at.append(part)
                    todo_at.append(_next_candidates(sections, state, part, 0, 0))
                    outcome = OPEN
                continue
            if outcome == FOUND:
                state[SOLVED][box] = undo_at[depth][4]
            undo = undo_at.pop()
            _take_back(sections, state, box, undo)
            # Nothing left shares a section with the box: its place is not why the rest fails.
            if outcome == FOUND or undo[5]:
                boxes_at.pop()
                todo_at.pop()
                continue
        if frame[_NEXT] == todo.size:
            outcome = FAILED
            boxes_at.pop()
            todo_at.pop()
            continue
        rank = int(todo[frame[_NEXT]])
        frame[_NEXT] += 1
        box = int(here[rank])
        offset = int(state[LEAST][box])
        if _overflows(sections, state, box, capacity):
            if _is_topmost(sections, state, box):  # no other box can come below it
                frame[_NEXT] = todo.size
            continue
        if used == tries:
            return OUT_OF_TRIES, used
        used += 1
        undo_at.append(_put(sections, state, box, frame[_FIRST], frame[_LAST]))
        frame[_PART] = frame[_LAST]
        if not _fits(state, offset, frame[_FIRST], frame[_LAST], capacity):
            outcome = FAILED
            continue
        outcome = FOUND
        if here.size == 1:
            continue
        if _falls_apart(sections, state, box):
            frame[_PART] = frame[_FIRST]
            continue
        rest = here[here != box]
        frames[depth + 1] = np.array([frame[_FIRST], frame[_LAST], 0, 0])
        boxes_at.append(rest)
        todo_at.append(_next_candidates(sections, state, rest, offset, rank))
        outcome = OPEN
    return outcome, used


class CanonicalSearch:
    def __init__(self, boxes: Boxes) -> None:
        self.sections = sections_of(boxes)
        totals = self.sections.totals
        times = boxes.length if boxes.stretch is None else boxes.stretch
        widths = {"ranks": boxes.length, "times": times}
        total = range_maxima(totals, self.sections.low, self.sections.high)
        starts = {"T": total, "S": boxes.start, "s": -boxes.start}
        self.letters = {
            # Areas may exceed 64 bits.
            unit: {"W": width, "A": width * boxes.size.astype(np.float64)} | starts
            for unit, width in widths.items()
        }

    def run(self, capacity: int, preorder: Preorder, tries: int) -> tuple[int, Ints, int]:
        """How it ended, the offsets if `FOUND`, and the placements tried, at most `tries`."""
        state, sections = initial(self.sections), tuple(self.sections)
        keys = np.array([self.letters[preorder.widths][key] for key in preorder.keys], np.float64)
        used, total_key = 0, preorder.keys.index("T")
        for boxes, first, last in self._parts():
            order = _ranked(sections, state, keys, total_key, boxes)
            outcome, more = _search(
                sections, state, keys, total_key, order, first, last, capacity, tries - used
            )
            used += more
            if outcome != FOUND:
                return outcome, state[SOLVED], used
        return FOUND, state[SOLVED], used

    def _parts(self) -> list[tuple[Ints, int, int]]:
        """Boxes and sections of each part of time that no box ties to the next."""
        ends = np.flatnonzero(self.sections.crossings == 0) + 1
        starts = np.concatenate([[0], ends[:-1]])
        low = self.sections.low
        return [
            (np.flatnonzero((first <= low) & (low < last)), int(first), int(last))
            for first, last in zip(starts, ends, strict=True)
        ]
