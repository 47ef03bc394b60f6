"""Keep, recompute or copy below the device at chosen cuts: a bound and a start in one program.

Extends `CutProgram`, whose letters stand. New are

    fetched[k, v] in {0, 1} : v, off the device while op t_k runs, arrives from below in interval k
    hosted[k, v]  in [0, 1] : a whole copy of v is below the device while op t_k runs
    spilled[k, v] in {0, 1} : that copy is on NVMe, not on the host
    waits[k]      >= 0      : time of interval k beyond its first runs and `again`; -1 is before t_0

Minimised is Σ cost · again + Σ waits. Rows, for each k:

    presence    `fetched` stands beside `carried` and `again` wherever a value must be there
    hosted      hosted[k, v] >= fetched[k, v]
                hosted[k, v] >= hosted[k + 1, v] - carried[k, v] - again[k, op of v]
    links       windows of d2h for `hosted`, of h2d for `fetched`, of write and read for `spilled`
    rooms       Σ size · (hosted - spilled)[k, v] <= room on the host; Σ size · spilled <= on NVMe

Any schedule in captured order gives a point that costs no more than its time less one run of each
op, so the optimum is a bound. Windows are those of one machine with release times and deadlines
(Horn 1974, https://doi.org/10.1002/nav.3800210113).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from remat.graph_capture.graph import Link, Links
from remat.solver.backends.mip import MipSolution, MixedProgram
from remat.solver.bounds.cut_program import CutProgram
from remat.solver.offload.fetch_as_recompute import movable
from remat.solver.problem import Problem

# How much a link can carry in time: copies that are released at or after the end of an op and
# must be through before the cut take no longer than the time between, in any order. Likewise what
# starts after the cut and is read at or before an op. Each value is copied whole, so each has its
# latency: without, a bound on files was 5 % too low. Windows are chains of one variable a value:
# written out, thousands of rows would have thousands of terms each.

_POSITIONS = 60  # windows a cut and link: more moved no bound by .01 % of the step
_LONGEST_COPY = 1e7  # of one copy, a thousand steps: HiGHS refuses coefficients far apart

_Terms = list[tuple[int, float]]


@dataclass(slots=True)
class _LinkWindows:
    """Adds windows to `program`, whose unit of time is `unit_us`."""

    program: MixedProgram
    problem: Problem
    cuts: tuple[int, ...]
    unit_us: float
    again: list[dict[int, int]]  # by interval, the variables of ops that run again there
    waits: dict[int, int]  # by interval, from -1 on, its time beyond first runs and `again`
    begin_us: list[float] = field(init=False)  # when op t would begin if every op ran once
    extra: dict[int, int] = field(default_factory=dict[int, int], init=False)
    reads: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]], init=False)

    def __post_init__(self) -> None:
        self.begin_us = [0.0, *np.cumsum(self.problem.cost_us).tolist()]

    def out(self, k: int, whole: dict[int, int], link: Link) -> None:
        """Copies out of values that are whole below while op t_k runs: a window a release x.
        Σ over v made at or after x of size · whole[v] <= rate · (end of x to the start of t_k)"""
        t, made = self.cuts[k], dict[int, _Terms]()
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
        <= rate · (end of t_k to the start of y)"""
        t, n, due = self.cuts[k], self.problem.n_ops, dict[int, _Terms]()
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
        return min(link.us(self.problem.size_bytes[v]) / self.unit_us, _LONGEST_COPY)

    def _chained(self, terms: _Terms, before: int | None) -> int:
        """A variable that is the sum of `terms` and of the chain so far."""
        chain = self.program.variable(upper=inf)
        so_far = [] if before is None else [(before, 1.0)]
        self.program.row([(chain, -1.0), *terms, *so_far], lower=0.0, upper=0.0)
        return chain

    def _fits(self, chain: int, between_us: float, intervals: Iterable[int]) -> None:
        extra = [(self._extra_of(i), -1.0) for i in intervals]
        self.program.row([(chain, 1.0), *extra], upper=between_us / self.unit_us)

    def _extra_of(self, i: int) -> int:
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
        if t not in self.reads:
            found: dict[int, int] = {}
            inputs = (*self.problem.inputs, ())
            for stage in range(t + 1, self.problem.n_ops + 1):
                for v in self.problem.needs[stage]:
                    # What forward returns has until its last op ends, where that does not read it.
                    is_returned = stage < self.problem.n_ops and v not in inputs[stage]
                    found.setdefault(v, stage + is_returned)
            self.reads[t] = found
        return self.reads[t]


def _evenly_taken(places: Iterable[int]) -> set[int]:
    """At most `_POSITIONS` of the places, the ends among them."""
    ordered = sorted(places)
    if len(ordered) <= _POSITIONS:
        return set(ordered)
    picked = np.linspace(0, len(ordered) - 1, _POSITIONS).round().astype(int).tolist()
    return {ordered[i] for i in picked}


@dataclass(slots=True, kw_only=True)
class JointCut(CutProgram):
    links: Links
    # A start copies only what can move, which is at least `least_bytes`; a bound anything.
    is_start: bool = False
    least_bytes: int = 1
    fetched: list[dict[int, int]] = field(default_factory=list[dict[int, int]], init=False)
    hosted: list[dict[int, int]] = field(default_factory=list[dict[int, int]], init=False)
    spilled: list[dict[int, int]] = field(default_factory=list[dict[int, int]], init=False)
    waits: dict[int, int] = field(default_factory=dict[int, int], init=False)
    can_move: list[bool] = field(default_factory=list[bool], init=False)

    def __post_init__(self) -> None:
        self.can_move = movable(self.problem)
        for i in range(-1, len(self.cuts)):
            self.waits[i] = self.program.variable(1.0, upper=inf)
        CutProgram.__post_init__(self)
        if not self.is_empty:
            for k in range(len(self.cuts)):
                self._hosted_rows(k)
                self._room_rows(k)
            self._link_rows()

    @property
    def has_nvme(self) -> bool:
        return self.links.write is not None and self.links.nvme_bytes > 0

    def _variables(self, k: int, values: list[int]) -> None:
        CutProgram._variables(self, k, values)
        leaving = (v for v in self.carried[k] if self._may_leave(k, v))
        fetched = {v: self.program.variable(integer=True) for v in leaving}
        self.fetched.append(fetched)
        self.hosted.append({v: self.program.variable() for v in fetched})
        spilled = fetched if self.has_nvme else ()
        self.spilled.append({v: self.program.variable(integer=True) for v in spilled})

    def _may_leave(self, k: int, v: int) -> bool:
        """Whether v may be off the device at cut k, and come back."""
        problem = self.problem
        if self.cuts[k] >= problem.n_forward and v in problem.held:  # in the caller's hands
            return False
        least_bytes = self.least_bytes if self.is_start else 1
        return problem.size_bytes[v] >= least_bytes and (not self.is_start or self.can_move[v])

    def _presence(self, k: int, v: int, runs: dict[int, int]) -> list[tuple[int, float]] | None:
        """carried[k, v] + runs[producer of v] + fetched[k, v]; None where v is there anyway."""
        terms = CutProgram._presence(self, k, v, runs)
        if terms is None or v not in self.fetched[k]:
            return terms
        return [*terms, (self.fetched[k][v], 1.0)]

    def _hosted_rows(self, k: int) -> None:
        """A fetched value is on the host; one there at cut k + 1 was at k, or made since."""
        following = self.hosted[k + 1] if k + 1 < len(self.cuts) else {}
        for v, index in self.hosted[k].items():
            self.program.row([(index, 1.0), (self.fetched[k][v], -1.0)], lower=0.0)
            if v in following:
                terms = [(index, 1.0), (following[v], -1.0), (self.carried[k][v], 1.0)]
                run = self.again[k].get(self.problem.producer[v])
                self.program.row(terms if run is None else [*terms, (run, 1.0)], lower=0.0)
        for v, index in self.spilled[k].items():
            self.program.row([(self.hosted[k][v], 1.0), (index, -1.0)], lower=0.0)

    def _room_rows(self, k: int) -> None:
        size_bytes = self.problem.size_bytes
        on_nvme = [(index, size_bytes[v]) for v, index in self.spilled[k].items()]
        on_host = [(index, size_bytes[v]) for v, index in self.hosted[k].items()]
        on_host += [(index, -size) for index, size in on_nvme]
        rooms = (on_host, self.links.host_bytes), (on_nvme, self.links.nvme_bytes)
        for sizes, room_bytes in rooms:
            if sum(size for _, size in sizes if size > 0) > room_bytes:  # else it cannot bind
                self.room_row(sizes, room_bytes)

    def _link_rows(self) -> None:
        windows = _LinkWindows(
            self.program, self.problem, self.cuts, self.cost_unit_us, self.again, self.waits
        )
        links = self.links
        for k in range(len(self.cuts)):
            windows.out(k, self.hosted[k], links.d2h)
            windows.back(k, self.fetched, links.h2d)
            if self.has_nvme and links.write is not None and links.read is not None:
                windows.out(k, self.spilled[k], links.write)
                if len(self.cuts) == 1:  # one cut may find on NVMe what the next finds on the host
                    windows.back(k, self.spilled, links.read)

    def _rounded_cost_us(self, answer: MipSolution) -> float:
        assert answer.values is not None
        waits_us = sum(answer.values[i] for i in self.waits.values()) * self.cost_unit_us
        return CutProgram._rounded_cost_us(self, answer) + waits_us

    def copied(self, values: list[float], which: list[dict[int, int]]) -> set[int]:
        return {v for part in which for v, index in part.items() if values[index] > 0.5}
