"""Picks the solver: store_all where it fits, checkmate where it is small, cut otherwise.

Solves: least time under a budget on the true peak, first runs in captured order.
Keeps everything if that fits, which is optimal. Otherwise runs `cut` for a bound and a
schedule, and on small graphs `checkmate` from there, to prove the optimum. Optimal where
the result says so. Cost: that of `cut`, plus `exact_s` at most. Shortcomings: those of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.checkmate import Checkmate
from remat.solver.cut import Cut
from remat.solver.result import Result
from remat.solver.search import Listener, Search


@dataclass(frozen=True)
class Auto:
    """The default solver.

    Attributes
    ----------
    gap : stop once time is proved within this fraction of the best.
    exact_ops : most ops of a graph that the exact MILP is tried on.
    exact_s : seconds it may take.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    gap: float = 1e-3
    exact_ops: int = 32
    exact_s: float = 10.0
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule found within `budget_bytes`, and the best proven bound."""
        search = Search(graph, budget_bytes, "auto", self.time_limit_s, self.progress)
        search.options = {
            "gap": self.gap, "exact_ops": self.exact_ops, "exact_s": self.exact_s,
        }  # fmt: skip
        try:
            self._run(search)
        except KeyboardInterrupt:
            search.cut_short = True
            search.message = "interrupted: this is the best schedule found until then"
        return search.result()

    def _run(self, search: Search) -> None:
        is_small = len(search.graph.ops) <= self.exact_ops
        Cut(gap=0.0 if is_small else self.gap).run(search)
        is_open = not search.proved_infeasible and search.gap > 1e-9
        if is_small and is_open and not search.out_of_time():
            Checkmate().run(search, min(self.exact_s, search.left_s))
            search.cut_short = search.out_of_time()
