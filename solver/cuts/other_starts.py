"""Schedules far from the best one: cuts at lower targets, repaired and polished one by one.

A neighbourhood search settles within seconds, and where depends on its start: on random wiring at
19 to 23 % of overhead, from starts of which the worst led to the best. So while a program of cuts
is solved, other starts are polished too. One that is not better still shows where to look: ops that
run again in other stages there make neighbourhoods of the best.
Source: path relinking (F. Glover, M. Laguna, R. Martí, "Scatter search and path relinking: advances
and applications", 2003, https://doi.org/10.1007/0-306-48056-5_1).
"""

from __future__ import annotations

from remat.solver import stopping
from remat.solver.bounds.lazy_cuts import Windows
from remat.solver.cuts.cut import RELAXED_POWERS, TARGETS, repair_from, targets_of
from remat.solver.local_search.events import Runs
from remat.solver.local_search.neighbourhoods import LargeNeighbourhoods, runs_by_stage
from remat.solver.search import Search

_TARGETS = tuple(TARGETS[at] for at in (0, 3, 5, 2, 4, 1))  # neighbours lead to much the same
_REPAIRED = 0.6  # program and repair of a start in CP-SAT's unit: about 1.5 s on 500 ops


class OtherStarts:
    """Starts of the programs that `windows` are now, one for each target; none of large graphs.

    The `first` of them come last, as the round before has tried them.
    """

    def __init__(self, search: Search, windows: Windows, seed: int = 0, first: int = 0) -> None:
        self._search, self._windows, self._seed = search, windows.copy(), seed
        first %= len(_TARGETS)
        parts = () if search.is_large else (*_TARGETS[first:], *_TARGETS[:first])
        self._targets = targets_of(search, parts)
        self.tried = first
        self.runs: Runs = ()  # of the last one

    def offer_next(self, workers: int) -> float:
        """Repair and polish one; returns the effort in CP-SAT's unit, 0 where none is left."""
        search = self._search
        if not self._targets:
            return 0.0
        target_bytes = self._targets.pop(0)
        self.tried += 1
        search.say(f"another start, for {target_bytes} bytes")
        start = self._windows.relaxed_start(target_bytes, stopping.RELAXED.of(search.left_s))
        inner = Search(search.graph, search.budget_bytes, search.solver, search.left_s)
        if start is not None:
            repair_from(inner, start, stopping.RELAXED_REPAIRS.most, RELAXED_POWERS)
        if inner.best is None:
            return _REPAIRED
        around = LargeNeighbourhoods(inner, search.out_of_time, self._seed, workers)
        spent = around.run(stopping.OTHER_START)
        search.offer_schedule(inner.best)
        self.runs = runs_by_stage(search.problem, inner.best)
        return _REPAIRED + spent
