"""Retention intervals on a constraint solver, from a schedule and a bound that `cut` found.

Also called: MOCCASIN, retention-interval constraint programming.
Paper: B. Bartan, H. Li, H. Teague, C. Lott, B. Dilkina, "MOCCASIN: Efficient Tensor
Rematerialization for Neural Networks", 2023, https://arxiv.org/abs/2304.14463.
Solves: least time under a budget on the true peak, first runs in captured order, each op run
at most `computations` times, and at most once again in a stage, there in captured order.
Generalised to ops with several outputs, workspace, pinned ops, forward outputs and outputs.
Optimal: among those schedules, when CP-SAT finishes. That proves nothing about schedules that
run an op more often, so the bound is that of `cut`, and the message says what was proved.
Cost: O(computations² · reads) variables, but event numbers grow with the square of the ops,
and CP-SAT is exponential at worst. Beyond `most_ops` ops the outcome is that of `cut`.
Shortcomings: without a start it finds little beyond some 200 ops, so it depends on that of `cut`.
The formulation is in `retention_model`.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.cuts.cut import Cut
from remat.solver.exact.retention_events import Stages, sequence_of_stages, stages_of_runs
from remat.solver.exact.retention_model import RetentionEffort, RetentionModel, RetentionOutcome
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.sequence import ops_of
from remat.solver.stopping import CUT_FIRST, Seconds
from remat.solver.store_all import store_all_state

RAISED = (2, 3)
"""Most computations of an op, one after the other, where that is chosen for the user."""
CLOSED = 1e-9
"""With a gap of at most this, nothing is left to find."""


@dataclass(frozen=True)
class Retention:
    """Constraint programming over retention intervals.

    Attributes
    ----------
    computations : most runs of an op; 0 tries 2, then 3.
    workers : threads of CP-SAT. With more than one, two runs may differ: all other solvers
        limit CP-SAT by its own count of work, with one worker for each program.
    seed : of CP-SAT.
    most_ops : graphs of more ops are left to `cut`.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    computations: int = 2
    workers: int = 1
    seed: int = 0
    most_ops: int = 500
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        for name, value, least, meaning in (
            ("computations", self.computations, 0, "0 (2, then 3) or more"),
            ("workers", self.workers, 1, "1 or more"),
            ("seed", self.seed, 0, "0 or more"),
            ("most_ops", self.most_ops, 0, "0 or more"),
        ):
            if value < least:
                raise SolverError(f"{name} must be {meaning}, not {value}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule within `budget_bytes`, and the bound of `cut`."""
        search = Search.of(self, "retention", graph, budget_bytes)
        with search.until_interrupted():
            self.run(search)
        return search.result()

    def run(self, search: Search) -> None:
        """Search from the schedule and bound of `cut`, with more computations if there is time."""
        self._begin(search)
        if search.gap <= CLOSED or search.proved_infeasible:
            return
        if search.problem.n_ops > self.most_ops:
            search.message = (
                f"the graph has {search.problem.n_ops} ops, more than most_ops = "
                f"{self.most_ops}: this is the outcome of cut"
            )
            return
        for computations in (self.computations,) if self.computations else RAISED:
            if search.gap > CLOSED and not search.out_of_time():
                self._improve(search, computations)

    def _begin(self, search: Search) -> None:
        """Run `cut` for its part of the time, or all of it on a graph that is too large."""
        part = CUT_FIRST if search.problem.n_ops <= self.most_ops else Seconds()
        with search.clock.limited_to(part.of(search.clock.time_limit_s)):
            Cut(gap=0.0).run(search)
        search.cut_short = search.out_of_time()

    def _improve(self, search: Search, computations: int) -> None:
        """Solve the program of so many computations, from the best schedule known."""
        search.say(f"at most {computations} computations of an op")
        model = RetentionModel(
            search.problem,
            search.budget_bytes - search.problem.resident_bytes,
            computations,
            start_of(search),
            search.bound_us - search.graph.time_us,
            is_feasible=search.best is not None,
            is_wide=not self.computations,
        )
        try:
            outcome = model.solve(
                RetentionEffort(max(search.left_s, 0.01), self.workers, self.seed)
            )
        finally:
            if model.best is not None:
                search.offer_sequence(sequence_of_stages(search.problem, model.best))
        self._note(search, computations, outcome)

    def _note(self, search: Search, computations: int, outcome: RetentionOutcome) -> None:
        """Say what the end of the program proves."""
        search.cut_short = not outcome.finished
        if not outcome.finished or search.gap <= CLOSED:
            return
        proved = "optimal" if search.best is not None else "no schedule was found"
        if search.best is not None and outcome.stages is None:
            proved = "nothing better exists"
        limit = f"{computations} computations a value"
        if not self.computations:
            limit = f"{limit}, or as many as in the schedule begun from"
        search.message = (
            f"{proved} among schedules with at most {limit}, in captured order inside a stage"
        )


def start_of(search: Search) -> Stages:
    """The schedule to begin from: the best, else that of the least peak, else every op once."""
    problem = search.problem
    known = search.best or search.lowest
    made: Schedule = known or store_all_state(problem).schedule()
    return stages_of_runs(problem, ops_of(problem, made))
