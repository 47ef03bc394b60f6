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
The formulation is in `StagedProgram`.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Free, Schedule, Step
from remat.solver.backends import mip
from remat.solver.bounds.cut_program import COST_SCALE, ROW_SCALE
from remat.solver.cuts.cut import Cut
from remat.solver.problem import Problem, inverted
from remat.solver.search import Listener, Search, check_least
from remat.solver.state import State, ops_of, recomputed_by_stage

# A row is one sweep over ops 0..t-1 in captured order; the last sweep of stage t ends with op t's
# first run. Runs are R of Jain et al. 2020, carried S, live_bytes U, freed FREE; made[row, v] keeps
# a value from counting twice when its op runs for another output.

_Terms = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class _Row:
    """One sweep: of stage `stage`, over ops 0..stage-1 and, if `is_last`, op `stage`."""

    index: int
    stage: int
    is_last: bool


class StagedProgram:
    """Variables, constraints and objective; every index by (row, ...)."""

    def __init__(self, problem: Problem, budget_bytes: int, passes: int) -> None:
        self.problem, self.budget_bytes, self.passes = problem, budget_bytes, passes
        self.program = mip.MixedProgram()
        self.runs: dict[tuple[int, int], int] = {}
        self.carried: dict[tuple[int, int], int] = {}
        self.made: dict[tuple[int, int], int] = {}
        self.freed: dict[tuple[int, int, int], int] = {}
        self.live_bytes: dict[tuple[int, int], int] = {}
        self.cost_unit_us = sum(problem.cost_us) / COST_SCALE or 1.0
        self.unit_bytes = max(budget_bytes - problem.resident_bytes, 1) / ROW_SCALE
        self.users = inverted(problem.inputs, problem.n_values)
        self.rows: list[_Row] = []
        for stage in range(problem.n_ops + 1):
            for sweep in range(passes):
                self.rows.append(_Row(len(self.rows), stage, sweep == passes - 1))
        for row in self.rows:
            self._variables(row)
        for row in self.rows:
            self._inputs_are_there(row)
            self._carried_was_there(row)
            self._made_where_new(row)
            self._freed_after_last_use(row)
            self._memory(row)

    def slots(self, row: _Row) -> range:
        return range(row.stage + 1 if row.is_last and row.stage < self.problem.n_ops else row.stage)

    def values_before(self, stage: int) -> list[int]:
        return [v for v in range(self.problem.n_values) if self.problem.producer[v] < stage]

    def freeable(self, row: _Row, op: int) -> tuple[int, ...]:
        if op == row.stage:  # the row ends with its own op: what is not carried on is gone anyway
            return ()
        return (*self.problem.inputs[op], *self.problem.outputs[op])

    def hazards(self, row: _Row, op: int, v: int) -> list[int]:
        """Ops after `op` in `row` that read v, the first run of its stage included."""
        found = [user for user in self.users[v] if op < user < len(self.slots(row))]
        # The last forward op needs the forward outputs too.
        extra = row.is_last and row.stage < self.problem.n_ops and op < row.stage
        if extra and v in self.problem.needs[row.stage] and row.stage not in found:
            found.append(row.stage)
        return found

    def _variables(self, row: _Row) -> None:
        """runs in {0, 1}, 1 for op t itself, 0 for pinned ops; carried in {0, 1}; rest >= 0."""
        problem, add = self.problem, self.program.variable
        for op in self.slots(row):
            is_first = op == row.stage
            upper = 0.0 if problem.no_recompute[op] and not is_first else 1.0
            # First runs are paid by every schedule.
            cost = 0.0 if is_first else problem.cost_us[op] / self.cost_unit_us
            low = 1.0 if is_first else 0.0
            self.runs[row.index, op] = add(cost, lower=low, upper=upper, integer=True)
            self.live_bytes[row.index, op] = add(upper=ROW_SCALE * 2)
            for v in problem.outputs[op]:
                self.made[row.index, v] = add()
            for v in self.freeable(row, op):
                self.freed[row.index, op, v] = add()
        for v in self.values_before(row.stage):
            is_held = v in problem.held and row.stage >= problem.n_forward
            low = 1.0 if is_held else 0.0
            self.carried[row.index, v] = add(lower=low, integer=True)

    def presence(self, row: _Row, v: int) -> _Terms:
        """carried[row, v] + runs[row, producer of v]."""
        op = self.problem.producer[v]
        keys = self.carried.get((row.index, v)), self.runs.get((row.index, op))
        return [(key, 1.0) for key in keys if key is not None]

    def _inputs_are_there(self, row: _Row) -> None:
        """runs[row, op] <= carried[row, u] + runs[row, producer of u], u in inputs of op."""
        for op in self.slots(row):
            for u in self.problem.needs[op] if op == row.stage else self.problem.inputs[op]:
                terms = [*self.presence(row, u), (self.runs[row.index, op], -1.0)]
                self.program.row(terms, lower=0.0)

    def _carried_was_there(self, row: _Row) -> None:
        """carried[row + 1, v] <= carried[row, v] + runs[row, producer of v]; 1 at the end."""
        following = row.index + 1
        if following == len(self.rows):
            for v in self.problem.needs[self.problem.n_ops]:
                self.program.row(self.presence(row, v), lower=1.0)
            return
        for v in self.values_before(self.rows[following].stage):
            terms = [*self.presence(row, v), (self.carried[following, v], -1.0)]
            self.program.row(terms, lower=0.0)

    def _made_where_new(self, row: _Row) -> None:
        """made[row, v] >= runs[row, producer of v] - carried[row, v]."""
        for op in self.slots(row):
            for v in self.problem.outputs[op]:
                terms = [(self.made[row.index, v], 1.0), (self.runs[row.index, op], -1.0)]
                if (row.index, v) in self.carried:
                    terms.append((self.carried[row.index, v], 1.0))
                self.program.row(terms, lower=0.0)

    def _freed_after_last_use(self, row: _Row) -> None:
        """freed[row, op, v] <= runs[row, op], 1 - carried[row + 1, v], 1 - runs[row, later]."""
        for op in self.slots(row):
            for v in self.freeable(row, op):
                index = self.freed[row.index, op, v]
                self.program.row([(index, 1.0), (self.runs[row.index, op], -1.0)], upper=0.0)
                for other in self.blockers(row, op, v):
                    self.program.row([(index, 1.0), (other, 1.0)], upper=1.0)
                if self.is_end_output(row, v):  # what the step returns stays to its end
                    self.program.upper[index] = 0.0

    def is_end_output(self, row: _Row, v: int) -> bool:
        return row.index + 1 == len(self.rows) and v in self.problem.needs[self.problem.n_ops]

    def blockers(self, row: _Row, op: int, v: int) -> list[int]:
        """Variables of which each keeps v from being freed after `op`."""
        following = self.carried.get((row.index + 1, v))
        later = [self.runs[row.index, user] for user in self.hazards(row, op, v)]
        return later if following is None else [*later, following]

    def _memory(self, row: _Row) -> None:
        """live_bytes after op = before + sum made - sum freed; before + op's own <= budget."""
        problem, carried = self.problem, self.values_before(row.stage)
        sizes = [size_bytes / self.unit_bytes for size_bytes in problem.size_bytes]
        # At first, what is carried.
        before: _Terms = [(self.carried[row.index, v], sizes[v]) for v in carried]
        room = (self.budget_bytes - problem.resident_bytes) / self.unit_bytes
        for op in self.slots(row):
            run = self.runs[row.index, op]
            self.program.row([*before, (run, problem.own_bytes[op] / self.unit_bytes)], upper=room)
            after: _Terms = [(self.live_bytes[row.index, op], -1.0), *before]
            after += [(self.made[row.index, v], sizes[v]) for v in problem.outputs[op]]
            after += [(self.freed[row.index, op, v], -sizes[v]) for v in self.freeable(row, op)]
            self.program.row(after, lower=0.0, upper=0.0)
            before = [(self.live_bytes[row.index, op], 1.0)]

    def extra_time(self, *, lower_us: float, upper_us: float) -> None:
        """Bound the objective: time beyond one run of each op."""
        slack = 1e-6  # times are sums of floats: without slack, rounding could cut off the optimum
        terms = [(i, cost) for i, cost in enumerate(self.program.objective) if cost]
        lower = max(lower_us, 0.0) / self.cost_unit_us * (1 - slack)
        upper = upper_us / self.cost_unit_us * (1 + slack) + slack
        self.program.row(terms, lower=lower, upper=upper)


def _point_of(made: StagedProgram, schedule: Schedule) -> list[float]:
    """The variables' values for a schedule that runs no op twice in a stage."""
    problem = made.problem
    recomputed = recomputed_by_stage(problem, ops_of(problem, schedule))
    state = State.from_recomputed(problem, recomputed)
    point = [0.0] * len(made.program.lower)
    for row in made.rows:
        # All runs of a stage are in its last sweep.
        again = {*recomputed[row.stage], row.stage} if row.is_last else set[int]()
        for op in made.slots(row):
            point[made.runs[row.index, op]] = float(op in again)
        for v in made.values_before(row.stage):
            point[made.carried[row.index, v]] = float(state.rows[row.stage][v])
    for row in made.rows:
        _complete(made, row, point)
    return point


def _complete(made: StagedProgram, row: _Row, point: list[float]) -> None:
    sizes = made.problem.size_bytes
    live = sum(sizes[v] for v in made.values_before(row.stage) if point[made.carried[row.index, v]])
    for op in made.slots(row):
        does_run = point[made.runs[row.index, op]]
        for v in made.problem.outputs[op]:
            there = made.carried.get((row.index, v))
            is_new = does_run > 0 and not (there is not None and point[there])
            point[made.made[row.index, v]] = float(is_new)
            live += sizes[v] * is_new
        for v in made.freeable(row, op):
            index = made.freed[row.index, op, v]
            is_blocked = any(point[i] for i in made.blockers(row, op, v))
            if does_run and made.program.upper[index] and not is_blocked:
                point[index] = 1.0
                live -= sizes[v]
        point[made.live_bytes[row.index, op]] = live / made.unit_bytes


def _steps_of_point(made: StagedProgram, values: list[float]) -> list[Step]:
    problem, steps, live = made.problem, list[Step](), dict[int, None]()
    for row in made.rows:
        ran = [op for op in made.slots(row) if values[made.runs[row.index, op]] > 0.5]
        spare = [v for v in live if not _is_needed_after(made, row, -1, v, ran, values)]
        _free(problem, spare, live, steps)
        for op in ran:
            # It would make nothing new.
            if all(v in live for v in problem.outputs[op]) and op != row.stage:
                continue
            steps.append(Compute(problem.graph.ops[op].name))
            live.update(dict.fromkeys(problem.outputs[op]))
            spare = [v for v in live if not _is_needed_after(made, row, op, v, ran, values)]
            _free(problem, spare, live, steps)
    return steps


def _is_needed_after(
    made: StagedProgram, row: _Row, op: int, v: int, ran: list[int], values: list[float]
) -> bool:
    following = made.carried.get((row.index + 1, v))
    is_carried = following is not None and values[following] > 0.5
    later = made.hazards(row, op, v)
    return is_carried or made.is_end_output(row, v) or any(user in ran for user in later)


def _free(problem: Problem, spare: list[int], live: dict[int, None], steps: list[Step]) -> None:
    for v in spare:
        del live[v]
        steps.append(Free(problem.names[v]))


_PASSES = ((8, 4), (12, 3), (24, 2))  # sweeps a stage has by default, by the most ops of the graph
EXACT_PASSES = 3  # no optimum was seen to be missed; fewer sweeps prove nothing of all schedules


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
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    backend: mip.Backend = "mathopt"
    passes: int = 0
    start: bool = True
    most_ops: int = 300
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.backend not in mip.BACKENDS:
            raise SolverError(
                f"unknown MIP backend '{self.backend}'; there are {', '.join(mip.BACKENDS)}"
            )
        if self.passes < 0:
            raise SolverError(f"passes must be 0 (chosen for you) or more, not {self.passes}")
        check_least(1, most_ops=self.most_ops)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "checkmate", graph, budget_bytes)
        with search.until_interrupted():
            if self.start:
                Cut(gap=0.0).run(search)
            if search.gap > 1e-9 and not search.proved_infeasible:
                self.run(search, search.left_s)
        return search.result()

    def run(self, search: Search, time_limit_s: float) -> None:
        graph = search.graph
        if len(graph.ops) > self.most_ops:
            search.note(
                f"use solver auto: the exact program takes at most {self.most_ops} ops "
                f"(most_ops), and this graph has {len(graph.ops)}"
            )
            return
        search.say("solving the exact program")
        n_ops = len(graph.ops)
        passes = self.passes or next((count for most, count in _PASSES if n_ops <= most), 1)
        made = StagedProgram(search.problem, search.budget_bytes, passes)
        start: list[float] | None = None
        upper_us = float("inf")
        if search.best is not None:
            upper_us = search.best_key[0] - graph.time_us
            start = _point_of(made, search.best)
        made.extra_time(lower_us=search.bound_us - graph.time_us, upper_us=upper_us)
        # A schedule that runs an op twice in a stage is no point of the program.
        if start is not None and not mip.satisfies(made.program, start):
            start = None
        limits = mip.Limits(time_limit_s)
        answer = mip.solve_program(made.program, limits, backend=self.backend, start=start)
        self._take(search, made, answer)

    def _take(self, search: Search, made: StagedProgram, answer: mip.MipSolution) -> None:
        if answer.values is not None:
            steps = _steps_of_point(made, answer.values)
            search.offer_schedule(Schedule.for_graph(search.graph, steps))
        search.cut_short = not answer.finished
        if answer.finished:
            search.message = f"the best among schedules of at most {made.passes} sweeps a stage"
        if made.passes < EXACT_PASSES:
            return
        if answer.proved_infeasible and search.best is None:
            search.proved_infeasible = True
        # Nothing is faster than the best, which may be its start.
        elif answer.finished and search.best is not None:
            search.raise_bound(search.best_key[0])
        elif not answer.finished:
            search.raise_bound(search.graph.time_us + answer.bound * made.cost_unit_us)
