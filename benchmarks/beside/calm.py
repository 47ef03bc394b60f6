"""Rounds that were timed while the machine was slower than it can be do not count.

On a machine that others share, steps take 1.1 to 1.4 times as long for seconds on end, and not all
steps alike, so that ratios shift as well. The unmodified step, which every round times, tells.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.beside.turns import Turns

ROUNDS = 7
MOST = 14
"""Rounds of one try, calm or not."""
TRIES, PAUSE_S = 3, 2.0
SLOWER = 1.08
"""Processes that run undisturbed differ by less: those with compiled steps by up to 5 %."""
SHORT_S = 0.02
"""Steps shorter than this differ by more at any time, and are taken as they are."""

Round = list[float]


@dataclass(frozen=True)
class Timed:
    """Seconds of each step in the rounds that count, and whether too few were calm."""

    rounds_s: list[Round]
    was_slow: bool

    def step_s(self, number: int) -> float:
        """Median of one step."""
        return statistics.median(taken[number] for taken in self.rounds_s)

    def ratio(self, number: int, base: int) -> float:
        """Median over rounds of one step's time over another's in the same round."""
        return statistics.median(taken[number] / taken[base] for taken in self.rounds_s)


def timed_calmly(measure: Callable[[], Round], turns: Turns, fastest: Path) -> Timed:
    """As many calm rounds as are needed, or the calmest where too few are after some tries.

    Others have their turns between tries.

    Parameters
    ----------
    measure : one round; its first step is the unmodified one.
    fastest : a file that holds the least median of that step over all rows of the model; updated.
        Where there is none yet, all rounds of a try are taken.
    """
    taken: list[Round] = []
    for number in range(TRIES):
        time.sleep(PAUSE_S if number else 0.0)
        with turns.alone():
            calm = _one_try(measure, fastest, taken)
            if len(calm) >= ROUNDS:
                return _noted(Timed(calm, was_slow=False), fastest)
    return Timed(sorted(taken)[:ROUNDS], was_slow=True)


def _one_try(measure: Callable[[], Round], fastest: Path, taken: list[Round]) -> list[Round]:
    """Add rounds to `taken` until enough are calm; the calm ones."""
    least_s = _least_s(fastest)
    wanted, most = 0 if least_s < math.inf else MOST, len(taken) + MOST
    while len(taken) < most and (len(taken) < wanted or len(_calm(taken, least_s)) < ROUNDS):
        taken.append(measure())
    return _calm(taken, least_s)


def _noted(found: Timed, fastest: Path) -> Timed:
    """`found`, whose unmodified step may be the fastest yet."""
    if found.step_s(0) < _least_s(fastest):
        fastest.write_text(str(found.step_s(0)))
    return found


def _least_s(fastest: Path) -> float:
    return float(fastest.read_text()) if fastest.exists() else math.inf


def _calm(taken: list[Round], least_s: float) -> list[Round]:
    """Rounds in which the unmodified step was nearly as fast as it is known to be."""
    fastest_s = sorted(each[0] for each in taken)[:ROUNDS]
    known_s = min(least_s, statistics.median(fastest_s)) if taken else least_s
    return [each for each in taken if each[0] <= max(SLOWER * known_s, SHORT_S)]
