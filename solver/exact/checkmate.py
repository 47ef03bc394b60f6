"""Checkmate's mixed-integer program: exact on small graphs, in captured order.

Also called: optimal tensor rematerialisation, the R-S-U-FREE program.
Paper: P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", 2020, https://arxiv.org/abs/1910.02653.
Solves: least time under a budget on the true peak. Stage t ends with the first run of op t.
Before it any earlier op may run again, in captured order, at most once in a sweep. `passes` sets
how many sweeps a stage has. The paper has one. One sweep does not reach schedules that run an
op twice within a stage, or in another order. On random graphs of up to 8 ops at their tightest
budgets, 1 sweep missed the optimum in about 2.5 % of cases, 2 sweeps in 0.2 %, 3 in none seen.
So a bound is claimed from 3 sweeps on. With fewer, the result's message says among which
schedules it is the best, and the bound is that of `cut`.
Generalised to ops with several outputs, workspace, pinned ops, forward outputs and outputs.
Optimal: among those schedules, when the solver finishes. Cost: O(passes · ops ·
(ops + reads)) variables. Shortcomings: beyond some 60 ops open solvers rarely finish.
The formulation is in `staged_program`.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.backends.mip import BACKENDS, Answer, Backend, Limits, satisfies, solve_program
from remat.solver.cuts.cut import Cut
from remat.solver.exact.staged_program import StagedProgram, point_of, steps_of_point
from remat.solver.result import Result
from remat.solver.search import Listener, Search

PASSES = ((8, 4), (12, 3), (24, 2))
"""Sweeps a stage has by default, by the most ops of the graph."""
EXACT_PASSES = 3
"""With so many sweeps no optimum was seen to be missed. Fewer prove nothing of all schedules."""


@dataclass(frozen=True)
class Checkmate:
    """Exact solver for small graphs.

    Attributes
    ----------
    backend : ``mathopt`` (HiGHS) or ``pulp`` (CBC).
    passes : sweeps a stage has; 0 takes 4 up to 8 ops, 3 up to 12, 2 up to 24, else 1 as
        the paper.
    start : begin from the schedule of `cut`, and use its bound.
    most_ops : larger graphs keep the schedule of `cut`, as their program takes gigabytes.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    backend: Backend = "mathopt"
    passes: int = 0
    start: bool = True
    most_ops: int = 300
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise SolverError(
                f"unknown MIP backend '{self.backend}'; there are {', '.join(BACKENDS)}"
            )
        if self.passes < 0:
            raise SolverError(f"passes must be 0 (chosen for you) or more, not {self.passes}")
        if self.most_ops < 1:
            raise SolverError(f"most_ops must be 1 or more, not {self.most_ops}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule within `budget_bytes`, optimal if the program was solved."""
        search = Search.of(self, "checkmate", graph, budget_bytes)
        with search.until_interrupted():
            if self.start:
                Cut(gap=0.0).run(search)
            if search.gap > 1e-9 and not search.proved_infeasible:
                self.run(search, search.left_s)
        return search.result()

    def run(self, search: Search, time_limit_s: float) -> None:
        """Solve the program within `time_limit_s`, from what `search` knows."""
        graph = search.graph
        if len(graph.ops) > self.most_ops:
            search.note(
                f"The exact program is for {self.most_ops} ops (most_ops), this graph has "
                f"{len(graph.ops)}: use solver auto"
            )
            return
        search.say("solving the exact program")
        made = StagedProgram(search.problem, search.budget_bytes, self._passes_for(graph))
        start: list[float] | None = None
        upper_us = float("inf")
        if search.best is not None:
            upper_us = search.best_key[0] - graph.time_us
            start = point_of(made, graph, search.best)
        made.extra_time(lower_us=search.bound_us - graph.time_us, upper_us=upper_us)
        if start is not None and not satisfies(made.program, start):
            start = None
        limits = Limits(time_limit_s=time_limit_s)
        answer = solve_program(made.program, limits, backend=self.backend, start=start)
        self._take(search, made, answer)

    def _passes_for(self, graph: TrainingGraph) -> int:
        if self.passes:
            return self.passes
        return next((count for most, count in PASSES if len(graph.ops) <= most), 1)

    def _take(self, search: Search, made: StagedProgram, answer: Answer) -> None:
        if answer.values is not None:
            steps = steps_of_point(made, answer.values)
            search.offer_schedule(Schedule.for_graph(search.graph, steps))
        search.cut_short = not answer.finished
        if answer.finished:
            search.message = f"the best among schedules of at most {made.passes} sweeps a stage"
        if made.passes < EXACT_PASSES:
            return
        if answer.proved_infeasible and search.best is None:
            search.proved_infeasible = True
        elif answer.finished and search.best is not None:
            search.raise_bound(search.best_key[0])
        elif not answer.finished:
            search.raise_bound(search.graph.time_us + answer.bound * made.cost_unit_us)
