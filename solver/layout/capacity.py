"""Placements within a capacity: canonical searches by several preorders, in turns.

Which preorder does well differs from step to step, and one that does takes little more than one
try a box. So each gets few tries, and in a longer search all of them get twice as many in turn.
"""

from __future__ import annotations

from typing import NamedTuple

from remat.solver.layout.boxes import Boxes, Ints
from remat.solver.layout.canonical import FAILED, FOUND, CanonicalSearch, Preorder

STEP_PREORDERS = tuple(map(Preorder, ("WAT", "TAW", "TsW", "WTs", "TWA", "TSW", "WTS")))
"""For training steps, where what starts together is read together."""
CHIP_PREORDERS = tuple(
    Preorder(keys, widths) for widths in ("ranks", "times") for keys in ("WAT", "TAW", "TWA")
)
"""MiniMalloc's, for instances whose times are far apart: widths both ways."""


class Fitted(NamedTuple):
    """What a search within a capacity found.

    `offsets` is None where nothing was found, and `is_proved` tells whether nothing exists.
    """

    offsets: Ints | None
    preorder: Preorder
    tries: int
    is_proved: bool


def dive(search: CanonicalSearch, capacity: int, share: int, tries: int) -> Fitted:
    """One search by each preorder of steps, with `share` tries each, at most `tries` in all."""
    return _in_turn(search, capacity, STEP_PREORDERS, share, tries)


def fit_into(boxes: Boxes, capacity: int, tries: int) -> Fitted:
    """Searches by MiniMalloc's preorders until one ends or `tries` are used up in all.

    Each gets two tries a box, then four, and so on.
    """
    search, share, used = CanonicalSearch(boxes), len(boxes), 0
    while True:
        share = min(2 * share, tries - used)
        found = _in_turn(search, capacity, CHIP_PREORDERS, share, tries - used)
        used += found.tries
        if found.offsets is not None or found.is_proved or used >= tries:
            return found._replace(tries=used)


def _in_turn(
    search: CanonicalSearch,
    capacity: int,
    preorders: tuple[Preorder, ...],
    share: int,
    tries: int,
) -> Fitted:
    """`share` tries by each of the preorders, at most `tries` in all."""
    used = 0
    for preorder in preorders:
        outcome, offsets, more = search.run(capacity, preorder, min(share, tries - used))
        used += more
        if outcome in (FOUND, FAILED):
            found = offsets if outcome == FOUND else None
            return Fitted(found, preorder, used, outcome == FAILED)
        if used == tries:
            break
    return Fitted(None, preorders[-1], used, is_proved=False)
