"""Keep, recompute or copy below the device at chosen cuts: a bound and a start in one program.

It extends `CutProgram`, whose letters stand: `carried[k, v]`, v is on the device while op t_k first
runs; `again[k, op]`, op runs again in interval k. New are

    fetched[k, v] in {0, 1} : v, off the device while op t_k runs, arrives from below in interval k
    hosted[k, v]  in [0, 1] : a whole copy of v is below the device while op t_k runs
    spilled[k, v] in {0, 1} : that copy is on NVMe, not on the host
    waits[k]      >= 0      : time of interval k beyond its first runs and `again`; -1 is before t_0

The time beyond the first runs is minimised: Σ cost · again + Σ waits. Rows, for each k:

    presence    `fetched` stands beside `carried` and `again` wherever a value must be there
    hosted      hosted[k, v] >= fetched[k, v]
                hosted[k, v] >= hosted[k + 1, v] - carried[k, v] - again[k, op of v]
    links       windows of d2h for `hosted`, of h2d for `fetched`, of write and read for `spilled`
    rooms       Σ size · (hosted - spilled)[k, v] <= room on the host; Σ size · spilled <= on NVMe

Any schedule in captured order, with any recomputations and copies, gives a point that costs no more
than its time less one run of each op. So the optimum is a bound on the time of all of them.
Extends the cuts of `cut_program`; the windows are those of one machine with release times and
deadlines (Horn 1974, https://doi.org/10.1002/nav.3800210113).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from remat.graph_capture.links import Links
from remat.solver.backends.mip import Answer
from remat.solver.bounds.cut_program import MOST_SIZE, ROW_SCALE, CutProgram
from remat.solver.offload.arrivals import movable
from remat.solver.offload.link_windows import LinkWindows


@dataclass(slots=True, kw_only=True)
class JointCut(CutProgram):
    """`CutProgram` with copies over `links`.

    Attributes
    ----------
    is_start : the point is to become a schedule: copies take their latency, and only values are
        copied that can be. Else all may be, and only their bytes take time: a bound.
    least_bytes : a start copies no smaller value.
    """

    links: Links
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
        """Whether a copy may go on to NVMe."""
        return self.links.write is not None and self.links.nvme_bytes > 0

    def _variables(self, k: int, values: list[int]) -> None:
        CutProgram._variables(self, k, values)
        fetched = {
            v: self.program.variable(integer=True) for v in self.carried[k] if self._may_leave(k, v)
        }
        self.fetched.append(fetched)
        self.hosted.append({v: self.program.variable() for v in fetched})
        spilled = fetched if self.has_nvme else ()
        self.spilled.append({v: self.program.variable(integer=True) for v in spilled})

    def _may_leave(self, k: int, v: int) -> bool:
        """Whether v may be off the device at cut k, and come back."""
        problem = self.problem
        if self.cuts[k] >= problem.n_forward and v in problem.held:
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
        """What is fetched is hosted; what is hosted later was so before, or made since."""
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
        """What is below fits there."""
        on_host = [(index, v, 1.0) for v, index in self.hosted[k].items()]
        on_host += [(index, v, -1.0) for v, index in self.spilled[k].items()]
        on_nvme = [(index, v, 1.0) for v, index in self.spilled[k].items()]
        self._room_row(on_host, self.links.host_bytes)
        if on_nvme:
            self._room_row(on_nvme, self.links.nvme_bytes)

    def _room_row(self, terms: list[tuple[int, int, float]], room_bytes: float) -> None:
        sizes = [(index, sign * self.problem.size_bytes[v]) for index, v, sign in terms]
        if sum(size for _, size in sizes if size > 0) <= room_bytes:
            return
        unit = max(room_bytes, 1) / ROW_SCALE
        row = [(i, max(min(size / unit, MOST_SIZE), -MOST_SIZE)) for i, size in sizes]
        self.program.row(row, upper=room_bytes / unit)

    def _link_rows(self) -> None:
        windows = LinkWindows(
            self.program, self.problem, self.cuts, self.cost_unit_us, self.again, self.waits,
            with_latency=self.is_start,
        )  # fmt: skip
        links = self.links
        for k in range(len(self.cuts)):
            windows.out(k, self.hosted[k], links.d2h)
            windows.back(k, self.fetched, links.h2d)
            if self.has_nvme and links.write is not None and links.read is not None:
                windows.out(k, self.spilled[k], links.write)
                # Of several cuts, one may find on NVMe what the next finds on the host.
                if len(self.cuts) == 1:
                    windows.back(k, self.spilled, links.read)

    def _rounded_cost_us(self, answer: Answer) -> float:
        assert answer.values is not None
        waits_us = sum(answer.values[i] for i in self.waits.values()) * self.cost_unit_us
        return CutProgram._rounded_cost_us(self, answer) + waits_us

    def copied(self, values: list[float], which: list[dict[int, int]]) -> set[int]:
        """Values that a point fetches, or spills, in some interval."""
        return {v for part in which for v, index in part.items() if values[index] > 0.5}
