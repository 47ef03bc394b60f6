"""Rows that say how much a link can carry in time, for a program of cuts.

What a copy out carries was made before; what a copy back carries is read later. On one link, in any
order of copies, the bytes that are released at or after the end of an op and must be through before
the cut take no longer than the time between. Likewise the bytes that can only start after the cut
and are read at or before an op. The time between two ops is that of the first runs there, and all
that an interval has beyond its first runs: recomputations and waits.

Each window adds up a prefix of the bytes. As chains of one variable a value, the matrix stays
sparse: written out, thousands of rows would have thousands of terms each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from remat.graph_capture.links import Link
from remat.solver.backends.mip import MixedProgram
from remat.solver.problem import Problem

POSITIONS = 60
"""Windows a cut and link. Each is a row; more of them moved no bound by .01 % of the step."""
LONGEST_COPY = 1e7
"""Most that one copy counts, in the program's unit: a thousand steps. More says nothing else, and
HiGHS refuses coefficients that are far apart."""

Terms = list[tuple[int, float]]


@dataclass(slots=True)
class LinkWindows:
    """Adds windows to `program`, whose unit of time is `unit_us`.

    Attributes
    ----------
    again : for each interval the variables of ops that run again there. waits : for each interval,
        from -1 on, the variable of its time beyond first runs and those.
    with_latency : whether a copy takes its latency too. Without, a window holds for any link.
    begin_us : when op t would begin if every op ran once.
    """

    program: MixedProgram
    problem: Problem
    cuts: tuple[int, ...]
    unit_us: float
    again: list[dict[int, int]]
    waits: dict[int, int]
    with_latency: bool
    begin_us: list[float] = field(init=False)
    extra: dict[int, int] = field(default_factory=dict[int, int], init=False)
    reads: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]], init=False)

    def __post_init__(self) -> None:
        self.begin_us = [0.0, *np.cumsum(self.problem.cost_us).tolist()]

    def out(self, k: int, whole: dict[int, int], link: Link) -> None:
        """Copies out of values that are whole below while op t_k runs: a window a release x.

        Σ over v made at or after x of size · whole[v] <= rate · (end of x to the start of t_k)
        """
        t, made = self.cuts[k], dict[int, Terms]()
        for v, index in whole.items():
            made.setdefault(self.problem.producer[v], []).append((index, self._took(v, link)))
        marks, later = _evenly_taken(made), None
        for x in sorted(made, reverse=True):
            later = self._chained(made[x], later)
            if x in marks:
                within = range(self._interval(x + 1) if x < t else k - 1, k)
                self._fits(later, self.begin_us[t] - self.begin_us[x + 1], within)

    def back(self, k: int, arriving: Sequence[dict[int, int]], link: Link) -> None:
        """Copies back that start after op t_k: a window a deadline y.

        Σ over i >= k, and v first read after t_i at or before y, of size · arriving[i][v]
        <= rate · (end of t_k to the start of y)
        """
        t, n, due = self.cuts[k], self.problem.n_ops, dict[int, Terms]()
        for i in range(k, len(self.cuts)):
            first = self._first_reads(self.cuts[i])
            for v, index in arriving[i].items():
                due.setdefault(first.get(v, n), []).append((index, self._took(v, link)))
        marks, before = {*_evenly_taken(due), n}, None
        for y in sorted(due):
            before = self._chained(due[y], before)
            if y in marks:
                last = self._interval(y) if y < n else len(self.cuts) - 1
                self._fits(before, self.begin_us[y] - self.begin_us[t + 1], range(k, last + 1))

    def _took(self, v: int, link: Link) -> float:
        size_bytes = self.problem.size_bytes[v]
        took_us = link.us(size_bytes) if self.with_latency else size_bytes / link.bytes_per_us
        return min(took_us / self.unit_us, LONGEST_COPY)

    def _chained(self, terms: Terms, before: int | None) -> int:
        """A variable that is the sum of `terms` and of the chain so far."""
        chain = self.program.variable(upper=inf)
        so_far = [] if before is None else [(before, 1.0)]
        self.program.row([(chain, -1.0), *terms, *so_far], lower=0.0, upper=0.0)
        return chain

    def _fits(self, chain: int, between_us: float, intervals: Iterable[int]) -> None:
        extra = [(self._extra_of(i), -1.0) for i in intervals]
        self.program.row([(chain, 1.0), *extra], upper=between_us / self.unit_us)

    def _extra_of(self, i: int) -> int:
        """The variable of what interval i takes beyond its first runs."""
        if i not in self.extra:
            self.extra[i] = self.program.variable(upper=inf)
            terms = [(self.extra[i], -1.0), (self.waits[i], 1.0)]
            for op, index in self.again[i].items() if i >= 0 else ():
                terms.append((index, self.problem.cost_us[op] / self.unit_us))
            self.program.row([term for term in terms if term[1]], lower=0.0, upper=0.0)
        return self.extra[i]

    def _interval(self, t: int) -> int:
        """The interval in which op t first runs: -1 up to and with t_0."""
        return bisect_left(self.cuts, t) - 1

    def _first_reads(self, t: int) -> dict[int, int]:
        """The first stage after op t that reads each value."""
        if t not in self.reads:
            found: dict[int, int] = {}
            for stage in range(t + 1, self.problem.n_ops + 1):
                for v in self.problem.needs[stage]:
                    found.setdefault(v, stage)
            self.reads[t] = found
        return self.reads[t]


def _evenly_taken(places: Iterable[int]) -> set[int]:
    """At most `POSITIONS` of the places, the ends among them."""
    ordered = sorted(places)
    if len(ordered) <= POSITIONS:
        return set(ordered)
    picked = np.linspace(0, len(ordered) - 1, POSITIONS).round().astype(int).tolist()
    return {ordered[i] for i in picked}
