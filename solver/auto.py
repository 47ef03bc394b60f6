"""A portfolio by size: keep all, one cut, blocks, then cuts and neighbourhoods in turn.

Solves: least time under a budget on the true peak; first runs in captured order, any
number of recomputations. Keeps everything if that fits, which is optimal. Otherwise a single
cut gives a bound and schedules; graphs of thousands of ops get their first one from
`hierarchical`. Where the gap stays open, graphs of a few ops go to `checkmate`, larger
ones to lazy cuts and large neighbourhoods side by side (`improve`).
Optimal where the result says so. Cost: near-linear where one cut closes the gap, which is
the rule on transformers; else the time limit. Shortcomings: those of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.checkmate import Checkmate
from remat.solver.cut import begin, has_room, is_large, is_open, take_least_peak
from remat.solver.hierarchical import Hierarchical
from remat.solver.improve import Improvement
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.store_all import store_all_state

EXACT_GAP = 1e-9


@dataclass(frozen=True)
class Auto:
    """The default solver.

    Attributes
    ----------
    gap : stop once time is proved within this fraction of the best.
    seed, workers : of the neighbourhoods; the same two give the same schedule, unless the
        time limit cuts the search short.
    exact_ops : most ops of a graph that the exact MILP is tried on.
    exact_s : seconds it may take.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    gap: float = 1e-3
    seed: int = 0
    workers: int = 2
    exact_ops: int = 32
    exact_s: float = 10.0
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SolverError(f"workers must be 1 or more, not {self.workers}")
        if not self.gap >= 0:
            raise SolverError(f"gap must be 0 or more, not {self.gap}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule found within `budget_bytes`, and the best proven bound."""
        search = Search(graph, budget_bytes, "auto", self.time_limit_s, self.progress)
        search.options = {"gap": self.gap, "seed": self.seed, "workers": self.workers}
        try:
            self._run(search)
        except KeyboardInterrupt:
            search.cut_short = True
            search.message = "interrupted: this is the best schedule found until then"
        return search.result()

    def _run(self, search: Search) -> None:
        plain = store_all_state(search.problem)
        if search.offer(plain):
            return
        if not has_room(search):
            search.proved_infeasible = True
        else:
            if is_large(search):
                Hierarchical().first(search)
            is_small = len(search.graph.ops) <= self.exact_ops
            gap = EXACT_GAP if is_small else self.gap
            lazy = begin(search, plain, gap)
            if lazy is not None:
                Improvement(search, lazy, gap, self.seed, self.workers).run()
            if is_small and is_open(search, gap):
                Checkmate().run(search, min(self.exact_s, search.left_s))
        if search.best is None:
            search.say("looking for the least peak")
            take_least_peak(search, plain)
