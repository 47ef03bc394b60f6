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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.solver.backends.processes import Task
from remat.solver.cuts.cut import Cut
from remat.solver.local_search.events import COST_UNITS
from remat.solver.problem import Problem
from remat.solver.search import Listener, Search, check_least
from remat.solver.state import ops_of, recomputed_by_stage, store_all_state
from remat.solver.stopping import CUT_FIRST, Seconds

# Time is a sequence of events. In stage t any earlier op may run again, in captured order; then op
# t has its first run. The last event is the end of the step.
Stages = list[list[int]]
"""For each op the stages in which it runs, beginning with that of its first run."""
_FORWARD_END, _STEP_END = -1, -2
"""They stand for an op: the one that uses forward outputs, and the one that uses the step's."""


def event_of(stage: int, op: int) -> int:
    # Stage t has t + 1 events, so t (t + 1) / 2 come before it.
    return stage * (stage + 1) // 2 + op


def _last_stages(problem: Problem) -> list[int]:
    """For each op the last stage in which another run of it can be of use; its own if none."""
    last = list(range(problem.n_ops))
    for op in reversed(range(problem.n_ops)):
        if not problem.no_recompute[op]:
            for reader in problem.readers[op]:
                # A reader may itself run as late as its own last stage.
                last[op] = max(last[op], reader if reader == problem.n_ops else last[reader])
    return last


def stage_of(event: int, op: int) -> int:
    return (math.isqrt(8 * (event - op) + 1) - 1) // 2


def sequence_of_stages(stages: Stages) -> list[int]:
    runs = [(event_of(stage, op), op) for op, times in enumerate(stages) for stage in times]
    return [op for _, op in sorted(runs)]


def stages_of_runs(problem: Problem, sequence: Sequence[int]) -> Stages:
    """Where each op runs in `sequence`, whose first runs are in captured order."""
    stages: Stages = [[op] for op in range(problem.n_ops)]
    for stage, again in enumerate(recomputed_by_stage(problem, sequence)):
        for op in dict.fromkeys(again):  # at most once in a stage
            stages[op].append(stage)
    return stages


_Used = dict[tuple[int, int, int], int]


def _shown_by(problem: Problem, stages: Stages) -> tuple[_Used, list[list[int]]]:
    """The run that made what (op, run, value) reads, and by value the last use of each run."""
    used: _Used = {}
    end = [[event_of(t, op) for t in stages[op]] for op in problem.producer]
    latest = [-1] * problem.n_ops
    handed: dict[int, int] = {}
    runs = [(event_of(t, op), op, i) for op, at in enumerate(stages) for i, t in enumerate(at)]

    def use(op: int, i: int, v: int, event: int) -> None:
        j = used[op, i, v] = handed.get(v, latest[problem.producer[v]])
        end[v][j] = max(end[v][j], event)

    for event, op, i in sorted(runs):
        for v in problem.inputs[op]:
            use(op, i, v, event)
        latest[op] = i
        # From the end of forward on, the caller holds its outputs: later uses read these copies.
        if op == problem.n_forward - 1 and i == 0:
            for v in problem.forward_outputs:
                use(_FORWARD_END, 0, v, event)
            handed = {v: latest[problem.producer[v]] for v in sorted(problem.held)}
    last = event_of(problem.n_ops, problem.n_ops)
    for v in problem.needs[problem.n_ops]:
        use(_STEP_END, 0, v, last)
    return used, end


# The program, built and solved with OR-Tools CP-SAT.
# Run i of an op is at event ``start[op, i]``; each of its outputs is then retained up to event
# ``end[v, i]``.
#
# minimise    Σ cost · active[op, i]                                   over i > 0
# subject to  active[op, i] -> one j: start[p, j] < start[op, i] <= end[v, j]   (op reads v of p)
#             cumulative: retained values, and outputs and workspace of what runs, <= room
#             active[op, i+1] -> end[v, i] < start[op, i+1]            (v in nobody's hands)
#
# A use of forward outputs at the end of forward, and of outputs at the end of the step, is
# written in the same way.


def _cost_units(problem: Problem) -> tuple[list[int], float]:
    """Costs as integers, and the time of one unit; exact where costs are small integers."""
    total_us = sum(problem.cost_us)
    if total_us <= COST_UNITS and all(cost == int(cost) for cost in problem.cost_us):
        return [int(cost) for cost in problem.cost_us], 1.0
    unit_us = total_us / COST_UNITS
    return [round(cost / unit_us) for cost in problem.cost_us], unit_us


class RetentionModel:
    """The program for at most `computations` runs of an op, within `room_bytes`."""

    def __init__(
        self, problem: Problem, room_bytes: int, computations: int, hint: Stages,
        least_us: float = 0.0, *, is_feasible: bool = True, is_wide: bool = False,
    ) -> None:  # fmt: skip
        """`hint` is a schedule to begin from, whose extra time is the most if it `is_feasible`.

        Extra time is at least `least_us`. If `is_wide`, an op may run as often as in the hint.
        """
        from ortools.sat.python import cp_model  # pyright: ignore[reportMissingTypeStubs]

        # OR-Tools ships no stubs.
        self.api = cast(Any, cp_model)
        self.model = self.api.CpModel()
        self.problem, self.computations, self.hint = problem, computations, hint
        self.least_us, self.is_feasible, self.is_wide = least_us, is_feasible, is_wide
        self.intervals, self.demands = list[Any](), list[int]()
        self.best: Stages | None = None
        self.last = _last_stages(problem)
        self.end_event = event_of(problem.n_ops, problem.n_ops)
        self.start: list[list[Any]] = [[event_of(op, op)] for op in range(problem.n_ops)]
        self.active: list[list[Any]] = [[True] for _ in range(problem.n_ops)]
        self._runs()
        within = [times[: len(self.start[op])] for op, times in enumerate(hint)]
        used, shown_end = _shown_by(problem, within)
        self.end = [self._retentions(v, ends) for v, ends in enumerate(shown_end)]
        self._uses(used)
        # All demands are multiples of the unit, so nothing is lost.
        unit = math.gcd(*self.demands) or 1
        demands = [demand // unit for demand in self.demands]
        self.model.add_cumulative(self.intervals, demands, room_bytes // unit)
        self._objective()

    def _runs(self) -> None:
        """Runs beyond the first, in order; an idle one stands at its last event."""
        model = self.model
        for op, last in enumerate(self.last):
            events = [event_of(stage, op) for stage in range(op + 1, last + 1)]
            times = self.hint[op]
            most = max(self.computations, len(times) if self.is_wide else 0)
            self._occupy(op, 0)
            for i in range(1, most if events else 1):
                start = model.new_int_var_from_domain(self.api.Domain.from_values(events), "")
                active = model.new_bool_var("")
                model.add_hint(active, i < len(times))
                model.add_hint(start, event_of(times[i], op) if i < len(times) else events[-1])
                model.add(start == events[-1]).only_enforce_if(~active)
                # Order the runs: a permutation of them is the same schedule.
                if i > 1:
                    model.add_implication(active, self.active[op][i - 1])
                    model.add(self.start[op][i - 1] < start).only_enforce_if(active)
                self.start[op].append(start)
                self.active[op].append(active)
                self._occupy(op, i)

    def _occupy(self, op: int, i: int) -> None:
        # Outputs and workspace take memory while the op runs.
        own_bytes = self.problem.output_bytes[op] + self.problem.workspace_bytes[op]
        if own_bytes:
            start, active = self.start[op][i], self.active[op][i]
            made = self.model.new_optional_fixed_size_interval_var(start, 1, active, "")
            self.intervals.append(made)
            self.demands.append(own_bytes)

    def _retentions(self, v: int, shown: list[int]) -> list[Any]:
        """The last use of `v` from each run of its op; an idle run ends where it starts."""
        op, model = self.problem.producer[v], self.model
        ends: list[Any] = []
        times = self.hint[op]
        for i, (start, active) in enumerate(zip(self.start[op], self.active[op], strict=True)):
            end = model.new_int_var(event_of(op, op), self.end_event, "")
            size = model.new_int_var(0, self.end_event, "")
            hinted = shown[i] if i < len(shown) else None
            begin = event_of(times[i] if i < len(times) else self.last[op], op)
            model.add_hint(end, begin if hinted is None else hinted)
            model.add_hint(size, 0 if hinted is None else hinted - begin)
            model.add(end == start + size)
            if i:
                model.add(size == 0).only_enforce_if(~active)
                # A value that nobody holds is dropped before it is made again.
                if v not in self.problem.held:
                    model.add(ends[-1] < start).only_enforce_if(active)
            if self.problem.size_bytes[v]:
                # Starts one event later, since `_occupy` counts the outputs at the event itself.
                kept = model.new_optional_interval_var(start + 1, size, end + 1, active, "")
                self.intervals.append(kept)
                self.demands.append(self.problem.size_bytes[v])
            ends.append(end)
        return ends

    def _uses(self, used: _Used) -> None:
        problem = self.problem
        for op in range(problem.n_ops):
            for i, (at, active) in enumerate(zip(self.start[op], self.active[op], strict=True)):
                for v in problem.inputs[op]:
                    self._use(v, at, at, active, used.get((op, i, v)))
        forward_end = event_of(problem.n_forward - 1, problem.n_forward - 1)
        for v in problem.forward_outputs:
            until = self.end_event if v in problem.held else forward_end
            self._use(v, forward_end, until, True, used.get((_FORWARD_END, 0, v)))
        for v in problem.needs[problem.n_ops]:
            # Held values have been required above, up to the end of the step.
            if v not in problem.held:
                self._use(v, self.end_event, self.end_event, True, used.get((_STEP_END, 0, v)))

    def _use(self, v: int, at: Any, until: Any, active: Any, hinted: int | None) -> None:
        """Some run of the producer of `v`, before event `at`, is retained up to `until`."""
        model, op = self.model, self.problem.producer[v]
        if len(self.start[op]) == 1:  # no choice
            model.add(self.end[v][0] >= until).only_enforce_if(active)
            return
        chosen = [model.new_bool_var("") for _ in self.start[op]]
        model.add(sum(chosen) == active)  # each use reads exactly one run
        for j, choice in enumerate(chosen):
            model.add_hint(choice, j == hinted)
            model.add(self.end[v][j] >= until).only_enforce_if(choice)
            if j:
                model.add_implication(choice, self.active[op][j])
                model.add(self.start[op][j] < at).only_enforce_if(choice)

    def _objective(self) -> None:
        costs, unit_us = _cost_units(self.problem)
        again = [(active, costs[op]) for op, runs in enumerate(self.active) for active in runs[1:]]
        extra = self.api.LinearExpr.weighted_sum(
            [active for active, _ in again], [cost for _, cost in again]
        )
        # Each rounded cost may be off by one unit, so the bound is lowered by as much.
        rounding = 0 if unit_us == 1.0 else len(again)
        self.model.add(extra >= max(math.floor(self.least_us / unit_us) - rounding, 0))
        # If the hint fits, look for nothing slower.
        if self.is_feasible:
            spent = sum(costs[op] * (len(times) - 1) for op, times in enumerate(self.hint))
            self.model.add(extra <= spent)
        self.model.minimize(extra)

    def stages_in(self, solution: Any) -> Stages:
        return [
            [op]
            + [
                stage_of(solution.value(start), op)
                for start, active in zip(self.start[op][1:], self.active[op][1:], strict=True)
                if solution.boolean_value(active)
            ]
            for op in range(self.problem.n_ops)
        ]

    def solve(self, seconds: float, workers: int = 1, seed: int = 0) -> bool:
        """Whether CP-SAT ended; `best` has the stages. Time makes runs of one seed differ."""
        solver = self.api.CpSolver()
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = seed
        solver.parameters.linearization_level = 2
        # A single worker takes turns at all of CP-SAT's strategies: 4 to 6 times as fast on FCN8 as
        # the first strategy alone.
        solver.parameters.interleave_search = workers == 1
        # On 200 ops probing costs more seconds than it saves.
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.max_presolve_iterations = 1
        # Ctrl-C goes to `Task`, which stops the search and keeps what was found.
        solver.parameters.catch_sigint_signal = False
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        watch = _watcher(self)
        status = Task(lambda: solver.solve(self.model, watch), solver.stop_search).wait()
        return status in (self.api.OPTIMAL, self.api.INFEASIBLE)


def _watcher(made: RetentionModel) -> Any:
    class Watcher(made.api.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            made.best = made.stages_in(self)

    return Watcher()


_RAISED = (2, 3)
"""Most computations of an op, one after the other, where that is chosen for the user."""
_CLOSED = 1e-9  # with a gap of at most this, nothing is left to find


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
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    computations: int = 2
    workers: int = 1
    seed: int = 0
    most_ops: int = 500
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.computations < 0:
            raise SolverError(
                f"computations must be 0 (2, then 3) or more, not {self.computations}"
            )
        check_least(1, workers=self.workers)
        check_least(0, seed=self.seed, most_ops=self.most_ops)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        return Search.of(self, "retention", graph, budget_bytes).result_of(self.run)

    def run(self, search: Search) -> None:
        # On graphs that are too large, `cut` gets all of the time.
        part = CUT_FIRST if search.problem.n_ops <= self.most_ops else Seconds()
        with search.clock.limited_to(part.of(search.clock.time_limit_s)):
            Cut(gap=0.0).run(search)
        search.cut_short = search.out_of_time()
        if search.gap <= _CLOSED or search.proved_infeasible:
            return
        if search.problem.n_ops > self.most_ops:
            search.message = (
                f"this is the result of cut: the graph has {search.problem.n_ops} ops, more than "
                f"most_ops = {self.most_ops}"
            )
            return
        for computations in (self.computations,) if self.computations else _RAISED:
            if search.gap > _CLOSED and not search.out_of_time():
                self._improve(search, computations)

    def _improve(self, search: Search, computations: int) -> None:
        search.say(f"at most {computations} computations of an op")
        model = RetentionModel(
            search.problem, search.budget_bytes - search.problem.resident_bytes, computations,
            start_of(search), search.bound_us - search.graph.time_us,
            is_feasible=search.best is not None, is_wide=not self.computations,
        )  # fmt: skip
        try:
            finished = model.solve(max(search.left_s, 0.01), self.workers, self.seed)
        # Keep what was found, also after Ctrl-C.
        finally:
            if model.best is not None:
                search.offer_sequence(sequence_of_stages(model.best))
        search.cut_short = not finished
        # A program that was cut short proves nothing; with a closed gap, the bound of `cut` says
        # more.
        if finished and search.gap > _CLOSED:
            self._note(search, computations, model.best)

    def _note(self, search: Search, computations: int, found: Stages | None) -> None:
        proved = "optimal" if search.best is not None else "no schedule was found"
        if search.best is not None and found is None:
            proved = "nothing is better"
        limit = f"{computations} computations a value"
        if not self.computations:
            limit = f"{limit}, or as many as in the schedule begun from"
        search.message = (
            f"{proved} among schedules with at most {limit}, in captured order inside a stage"
        )


def start_of(search: Search) -> Stages:
    problem = search.problem
    # Fall back to the least peak known, even above the budget, then to each op once.
    known = search.best or search.lowest
    made: Schedule = known or store_all_state(problem).schedule()
    return stages_of_runs(problem, ops_of(problem, made))
