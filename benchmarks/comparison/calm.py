"""Rounds that were timed while the machine was slower than it can be do not count.

On a machine that others share, steps take 1.1 to 1.4 times as long for seconds on end: where this
was seen, for 2 to 4 s in every 10 to 30. Not all steps slow down alike, so ratios shift as well.
Every round times the unmodified step, and that step tells whether the round was calm. Rounds are
picked, not rows: timing whole rows anew, up to three times, had cost 20 s a row.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from benchmarks.comparison.turns import Turns

ROUNDS = 7
"""Calm rounds that each row needs."""
MOST = 14
"""Rounds of one try, calm or not."""
TRIES, PAUSE_S = 3, 2.0
"""A row that is not calm is tried so often, with a pause for the machine to calm down."""
MOST_TRIES = 6
"""Tries where two steps are compared, a plan and the step that keeps everything.

Seven rounds do not tell an overhead to 3 points. On a machine whose neighbours share its cores,
ratios of one mixture of experts scattered by 6 % a round around 4.9 %, where 5.1 % was planned.
Medians of 7 of its 397 rounds scattered by 2.9 points, of 42 by .95, of 84 by .45. Means, trimmed
means, least times, quantiles and a regression on what the steps before and after took were
better for some numbers of rounds and worse for others: means of 21 rounds scattered by 1.5
points where their medians scattered by 1.3, means of 42 by .6.
"""
UNSURE = 0.0075
"""There are more tries until the standard error of the ratio is this small.

With that, 11 plans of the mixture of experts were off by .7 points in the median and 2.8 at
worst, in 70 to 84 rounds each. With 9 to 16 calm rounds in one order they were off by 2.9 and
5.6, and seven of the worst eight were too low. It costs 75 s a row on such a machine. On a quiet
one 14 rounds can do.
"""
MEDIANS, NORMAL = 1.2533, 1.4826
"""Standard error of a median, over that of a mean; standard deviation, over the median distance."""
SLOWER = 1.08
"""A calm round's unmodified step takes at most so many times that of the model's fastest row.

Processes that run undisturbed differ by less: those with compiled steps by up to 5 %.
"""
SHORT_S = 0.02
"""Steps shorter than this differ by more at any time, and always count as calm."""

Round = list[float]
Tries = list[list[Round]]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Timed:
    """Seconds of each step in the rounds that count, and whether too few were calm."""

    tries: Tries
    was_slow: bool

    @property
    def rounds_s(self) -> list[Round]:
        """The rounds of all tries."""
        return list(chain(*self.tries))

    def step_s(self, number: int) -> float:
        """Median time of one step."""
        return statistics.median(taken[number] for taken in self.rounds_s)

    def ratio(self, number: int, base: int) -> float:
        """Median over rounds of one step's time over another's in the same round."""
        return statistics.median(_ratios(self.rounds_s, (number, base)))

    def unsure(self, number: int, base: int) -> float:
        """Standard error of that ratio, by its scatter over rounds and over tries.

        The scatter over rounds alone would be too small: rounds of one try agree with each
        other, as the machine is slow for seconds on end.
        """
        over_rounds = _ratios(self.rounds_s, (number, base))
        over_tries = [statistics.median(_ratios(rounds, (number, base))) for rounds in self.tries]
        middle = statistics.median(over_rounds)
        away = statistics.median(abs(ratio - middle) for ratio in over_rounds)
        scatter = MEDIANS * NORMAL * away / math.sqrt(len(over_rounds))
        if len(over_tries) < 2:
            return math.inf
        return max(scatter, statistics.stdev(over_tries) / math.sqrt(len(over_tries)))


def timed_calmly(
    measure: Callable[[], Round], turns: Turns, fastest: Path, compared: Pair | None = None
) -> Timed:
    """As many calm rounds as are needed, or all if too few are calm after some tries.

    Other rows have their turns between tries. On a machine that is never calm, all rounds count.
    In its calmest ones the unmodified step happened to be fast, and the step right after it only
    partly so, which would tell another ratio.

    Parameters
    ----------
    measure : one round; its first step is the unmodified one.
    fastest : a file with the least median of that step over all rows of the model. It is kept
        up to date. If there is none yet, a try takes all its rounds.
    compared : numbers of two steps. There are more tries until the ratio of these is sure.
    """
    tries: Tries = []
    found = Timed(tries, was_slow=True)
    for number in range(MOST_TRIES if compared else TRIES):
        time.sleep(PAUSE_S if number else 0.0)
        with turns.alone():
            _one_try(measure, _least_s(fastest), tries)
        found = _counted(tries, _least_s(fastest), compared)
        may_end = not found.was_slow or len(tries) >= TRIES
        if may_end and (compared is None or found.unsure(*compared) <= UNSURE):
            break
    return found if found.was_slow else _noted(found, fastest)


def _one_try(measure: Callable[[], Round], least_s: float, tries: Tries) -> None:
    """Add a try to `tries`, which ends when enough of its rounds are calm."""
    taken: list[Round] = []
    tries.append(taken)
    fewest = 0 if least_s < math.inf else MOST
    enough = (_count(_calm(tries, least_s)) // ROUNDS + 1) * ROUNDS
    while len(taken) < MOST and (_count(tries) < fewest or _count(_calm(tries, least_s)) < enough):
        taken.append(measure())


def _counted(tries: Tries, least_s: float, compared: Pair | None) -> Timed:
    """The rounds that count: the calm ones, unless these are too few, or all are surer."""
    every = Timed(list(tries), was_slow=True)
    calm = Timed([rounds for rounds in _calm(tries, least_s) if rounds], was_slow=False)
    if len(calm.rounds_s) < ROUNDS:
        return every
    if compared is None or len(tries) < TRIES or calm.unsure(*compared) <= UNSURE:
        return calm
    return min(calm, every, key=lambda timed: timed.unsure(*compared))


def _ratios(rounds: list[Round], compared: Pair) -> list[float]:
    number, base = compared
    return [taken[number] / taken[base] for taken in rounds]


def _noted(found: Timed, fastest: Path) -> Timed:
    """`found`; its unmodified step is noted if it is the fastest yet."""
    if found.step_s(0) < _least_s(fastest):
        fastest.write_text(str(found.step_s(0)))
    return found


def _least_s(fastest: Path) -> float:
    return float(fastest.read_text()) if fastest.exists() else math.inf


def _count(tries: Tries) -> int:
    return sum(map(len, tries))


def _calm(tries: Tries, least_s: float) -> Tries:
    """Rounds in which the unmodified step was nearly as fast as it is known to be.

    A try in which most were not has none: its few were fast by chance.
    """
    fastest_s = sorted(each[0] for each in chain(*tries))[:ROUNDS]
    known_s = min(least_s, statistics.median(fastest_s)) if fastest_s else least_s
    most_s = max(SLOWER * known_s, SHORT_S)
    calm = [[each for each in rounds if each[0] <= most_s] for rounds in tries]
    return [
        some if 2 * len(some) >= len(every) else [] for some, every in zip(calm, tries, strict=True)
    ]
