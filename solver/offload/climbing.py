"""A climb over the sets of hosted ops, from the best schedule known.

Where one cut says little, as on convolutional nets, its point hosts the wrong values. The climb
takes the runs of the best schedule as they are. It lets one more op arrive instead of running
again, or one less, or one for another, and repairs and places what comes of it. The first step that
is faster is taken. It ends where none is, or after so many trials.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from remat.graph_capture.links import Links
from remat.schedules.schedule import Compute, Fetch, Offload, Schedule
from remat.solver.offload.arrivals import hosting, movable
from remat.solver.offload.with_copies import WEIGHINGS, Hosted, Weighing, offer_state
from remat.solver.problem import Problem
from remat.solver.search import Search
from remat.solver.stage import UnreachableError
from remat.solver.state import State
from remat.solver.stopping import CLIMBED

ADDED, CHANGED = 25, 6
"""Ops that are tried to be hosted as well; and of those and of the hosted, to be changed."""

Ops = frozenset[int]


@dataclass(slots=True)
class _Climb:
    search: Search
    links: Links
    gap: float
    can_move: list[bool]
    trials: int = 0

    def run(self) -> None:
        """Step up until nothing is faster, the gap is closed, or the trials are used up."""
        while self.search.is_open(self.gap) and self._step():
            pass

    def _step(self) -> bool:
        """The first trial that is faster than the best schedule; False where none is."""
        best, before_us = self.search.best, self.search.best_key[0]
        assert best is not None
        runs = arrivals_and_runs(self.search.problem, best)
        hosted, spilled = hosted_ops(self.search), spilled_values(best)
        for one, ops in product(WEIGHINGS, list(self._near(hosted, runs))):
            if self.trials >= CLIMBED.at(self.search.problem.n_ops) or self.search.out_of_time():
                return False
            self.trials += 1
            self._try(Hosted(ops, spilled), runs, one)
            if self.search.best_key[0] < before_us:
                return True
        return False

    def _try(self, hosted: Hosted, runs: list[list[int]], one: Weighing) -> None:
        problem = hosting(self.search.problem, hosted.ops, self.links, price=one.price)
        try:
            state = State.from_recomputed(problem, runs)
        except UnreachableError:  # an op that must run once arrives no longer
            return
        offer_state(self.search, state, hosted, self.links, one.power)

    def _near(self, hosted: Ops, runs: list[list[int]]) -> Iterator[Ops]:
        """Sets to try: one op more, one less, one for another; what saves most a byte first."""
        more, less = self._worth_hosting(hosted, runs), sorted(hosted)
        yield from (hosted | {op} for op in more[:ADDED])
        yield from (hosted - {op} for op in less)
        for op in less[:CHANGED]:
            yield from (hosted - {op} | {other} for other in more[:CHANGED])

    def _worth_hosting(self, hosted: Ops, runs: list[list[int]]) -> list[int]:
        problem, again_us = self.search.problem, dict[int, float]()
        for op in (op for stage in runs for op in stage):
            again_us[op] = again_us.get(op, 0.0) + problem.cost_us[op]
        can = [
            op for op in again_us
            if op not in hosted and problem.output_bytes[op]
            and all(self.can_move[v] for v in problem.outputs[op])
        ]  # fmt: skip
        return sorted(can, key=lambda op: (-again_us[op] / problem.output_bytes[op], op))


def climb_hosted(search: Search, links: Links, gap: float) -> None:
    """Offer what a climb from the best schedule of `search` comes to; there must be one."""
    search.say("other values below the device")
    _Climb(search, links, gap, movable(search.problem)).run()


def hosted_ops(search: Search) -> Ops:
    """Ops whose values the best schedule fetches."""
    assert search.best is not None
    producer = dict(zip(search.problem.names, search.problem.producer, strict=True))
    return frozenset(
        producer[step.value]
        for step in search.best.steps
        if isinstance(step, Fetch) and step.to == "device"
    )


def spilled_values(schedule: Schedule) -> frozenset[str]:
    """Values that a schedule brings to NVMe."""
    return frozenset(
        step.value for step in schedule.steps if isinstance(step, Offload) and step.to == "nvme"
    )


def arrivals_and_runs(problem: Problem, schedule: Schedule) -> list[list[int]]:
    """By stage the ops that run again, and those whose values are first read after a fetch.

    A fetch is issued early; when it must have arrived is what counts. First runs must be in the
    problem's order.
    """
    index = problem.graph.op_index
    producer = dict(zip(problem.names, problem.producer, strict=True))
    stages: list[list[int]] = [[] for _ in range(problem.n_ops + 1)]
    following, waiting = 0, dict[str, None]()
    for step in schedule.steps:
        if isinstance(step, Fetch) and step.to == "device":
            waiting[step.value] = None
        elif isinstance(step, Compute):
            op = index[step.op]
            arrived = [v for v in problem.graph.ops[op].inputs if v in waiting]
            for v in arrived:
                del waiting[v]
            stages[following] += [producer[v] for v in arrived]
            if op == following:
                following += 1
            else:
                stages[following].append(op)
    stages[problem.n_ops] += [producer[v] for v in waiting]
    return [list(dict.fromkeys(stage)) for stage in stages]
