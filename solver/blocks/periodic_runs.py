"""Where a sequence repeats itself: the longest run of one period, cut into repetitions.

Also called: maximal repetitions, runs. Distances between equal entries vote for periods, and
the periods with most votes are tried. Cost: a pass for each period tried, so linear.
Shortcomings: a period is missed if each entry in it occurs more than `LOOK_BACK` times, or if
`PERIODS` others have more votes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LOOK_BACK = 3
"""So many earlier ops of an op's class vote for a period, each by its distance."""
PERIODS = 16
"""Periods tried for each run: those with most votes."""
LEAST_OPS = 4
"""Fewest forward ops of a block; a shorter period is taken several times."""

Ints = npt.NDArray[np.int64]


def periodic_run(classes: Ints, crossing: Sequence[int]) -> list[int]:
    """Where the blocks of the longest run begin, and where the last ends; empty if none."""
    best: tuple[int, int, int, int] | None = None
    for period in _periods(classes):
        start, length = _longest_run(classes[:-period] == classes[period:])
        length += period
        step = period * -(-LEAST_OPS // period)
        count = length // step
        if count >= 2 and (best is None or (count * step, count) > best[:2]):
            best = count * step, count, start, length
    if best is None:
        return []
    covered, count, start, length = best
    return _phase(start, length, covered // count, crossing)


def _phase(start: int, length: int, step: int, crossing: Sequence[int]) -> list[int]:
    """Boundaries with few bytes across. One block fewer is taken only if that halves the bytes."""
    most = length // step
    best: tuple[float, list[int]] | None = None
    for offset in range(step):
        count = (length - offset) // step
        if count < 2:
            break
        places = [start + offset + i * step for i in range(count + 1)]
        score = sum(crossing[place] for place in places) / len(places)
        score *= 1 if count == most else 2
        if best is None or score < best[0]:
            best = score, places
    return best[1] if best else []


def _periods(classes: Ints) -> list[int]:
    """Distances between ops of one class, the most frequent first."""
    votes: Counter[int] = Counter()
    seen: dict[int, list[int]] = {}
    for position, kind in enumerate(classes.tolist()):
        earlier = seen.setdefault(kind, [])
        votes.update(position - other for other in earlier[-LOOK_BACK:])
        earlier.append(position)
    return [period for period, _ in votes.most_common(PERIODS)]


def _longest_run(equal: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the first longest run of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    lengths = edges[1::2] - edges[::2]
    if not lengths.size:
        return 0, 0
    longest = int(np.argmax(lengths))
    return int(edges[2 * longest]), int(lengths[longest])
