"""A mixed-integer program in plain numbers, and the two backends that solve it.

`highspy` must never be imported: OR-Tools carries its own HiGHS, and the two break each other.
HiGHS can neither be interrupted nor kept from printing, so it runs in another process, which ends
`_OVERTIME_S` after the limit: HiGHS does not look at the clock everywhere.
"""

from __future__ import annotations

import datetime
import math
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from remat.graph_capture.errors import SolverError
from remat.solver.backends.processes import (
    ChildEndedError,
    OverdueError,
    ended_after,
    run_in_process,
)

Backend = Literal["mathopt", "pulp"]
BACKENDS: tuple[Backend, ...] = ("mathopt", "pulp")
_LONGEST_S = 1e9  # 30 years: durations have an end
_OVERTIME_S = 0.5  # what HiGHS may take beyond its limit


_Row = tuple[float, float, list[tuple[int, float]]]
_Start = Sequence[float] | None


@dataclass(slots=True)
class MixedProgram:
    """Minimise `objective` · x subject to rows and bounds; variables are 0, 1, 2, ..."""

    lower: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])
    objective: list[float] = field(default_factory=list[float])
    integer: list[bool] = field(default_factory=list[bool])
    rows: list[_Row] = field(default_factory=list[_Row])

    def variable(
        self, cost: float = 0.0, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False
    ) -> int:
        """Add a variable; return its index."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.objective.append(cost)
        self.integer.append(integer)
        return len(self.lower) - 1

    def row(
        self, terms: list[tuple[int, float]], *, lower: float = -math.inf, upper: float = math.inf
    ) -> int:
        """Add lower ≤ Σ coefficient · variable ≤ upper; return its index."""
        self.rows.append((lower, upper, terms))
        return len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class MipSolution:
    """`values` None: no point found; `bound` -inf: nothing proved."""

    values: list[float] | None
    objective: float
    bound: float
    proved_infeasible: bool
    finished: bool  # False where a time or node limit ended the search
    iterations: int = 0  # of simplex: a measure of effort that is the same everywhere


# Of a backend that had to be ended, or that ended by itself.
LATE = MipSolution(None, math.inf, -math.inf, proved_infeasible=False, finished=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop. Gaps and `node_limit` are deterministic, `time_limit_s` is not."""

    time_limit_s: float = 60.0
    relative_gap: float = 0.0
    absolute_gap: float = 0.0
    node_limit: int | None = None
    relaxed: bool = False


def solve_program(
    program: MixedProgram, limits: Limits, *, backend: Backend = "mathopt",
    start: Sequence[float] | None = None,
) -> MipSolution:  # fmt: skip
    """`start` is a feasible point, used where the backend takes one."""
    if backend == "mathopt":
        try:
            return run_in_process(_with_mathopt, program, limits, start)
        except OverdueError:
            return LATE
        except ChildEndedError as error:  # it costs what this program would have found
            warnings.warn(f"{error}; the search goes on without its answer", stacklevel=2)
            return LATE
    if backend == "pulp":
        return _with_pulp(program, limits, start)
    raise SolverError(f"unknown MIP backend '{backend}'; there are {', '.join(BACKENDS)}")


def _with_mathopt(program: MixedProgram, limits: Limits, start: _Start) -> MipSolution:
    from ortools.math_opt.python import mathopt  # pyright: ignore[reportMissingTypeStubs]

    api = cast(Any, mathopt)
    model, variables = _mathopt_model(api, program, limits.relaxed)
    limit_s = min(max(limits.time_limit_s, 0.01), _LONGEST_S)
    parameters = api.SolveParameters(time_limit=datetime.timedelta(seconds=limit_s), random_seed=0)
    if not limits.relaxed:  # no gap and no nodes in a linear program
        parameters.relative_gap_tolerance = limits.relative_gap
        parameters.absolute_gap_tolerance = limits.absolute_gap
        parameters.node_limit = limits.node_limit
    hints = []
    if start is not None and not limits.relaxed:
        hints = [api.SolutionHint(variable_values=dict(zip(variables, start, strict=True)))]
    own = api.ModelSolveParameters(solution_hints=hints)
    with ended_after(min(limit_s + _OVERTIME_S, threading.TIMEOUT_MAX)):  # timers wait no longer
        result = _solved(api, model, parameters, own)
    return LATE if result is None else _mathopt_answer(api, result, variables)


def _solved(api: Any, model: Any, parameters: Any, own: Any) -> Any:
    """What HiGHS says; None where it fails. After its presolve it does so on a few programs."""
    for presolve in (None, api.Emphasis.OFF):
        parameters.presolve = presolve
        try:
            return api.solve(model, api.SolverType.HIGHS, params=parameters, model_params=own)
        except AttributeError as error:  # OR-Tools 9.15 cannot read the status of a failure
            if type(error.__context__).__name__ != "StatusNotOk":
                raise
    return None


def _mathopt_model(api: Any, program: MixedProgram, relaxed: bool) -> tuple[Any, list[Any]]:
    model = api.Model(name="")
    variables = [
        model.add_variable(lb=low, ub=high, is_integer=whole and not relaxed)
        for low, high, whole in zip(program.lower, program.upper, program.integer, strict=True)
    ]
    for variable, cost in zip(variables, program.objective, strict=True):
        if cost:
            model.objective.set_linear_coefficient(variable, cost)
    for low, high, terms in program.rows:
        row = model.add_linear_constraint(lb=low, ub=high)
        for index, coefficient in terms:
            row.set_coefficient(variables[index], coefficient)
    return model, variables


def _mathopt_answer(api: Any, result: Any, variables: list[Any]) -> MipSolution:
    reason = result.termination.reason
    kinds = api.TerminationReason
    bounds = result.termination.objective_bounds
    found = bool(result.has_primal_feasible_solution())
    return MipSolution(
        values=[float(x) for x in result.variable_values(variables)] if found else None,
        objective=float(bounds.primal_bound) if found else math.inf,
        bound=float(bounds.dual_bound),
        proved_infeasible=reason in (kinds.INFEASIBLE, kinds.INFEASIBLE_OR_UNBOUNDED),
        finished=reason in (kinds.OPTIMAL, kinds.INFEASIBLE, kinds.INFEASIBLE_OR_UNBOUNDED),
        iterations=int(result.solve_stats.simplex_iterations),
    )


def _with_pulp(program: MixedProgram, limits: Limits, start: _Start) -> MipSolution:
    import pulp  # pyright: ignore[reportMissingTypeStubs]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of names that PuLP 4 will drop
        try:
            return _run_pulp(cast(Any, pulp), program, limits, start)
        except pulp.PulpSolverError as error:
            warnings.warn(f"{error}; the search goes on without its answer", stacklevel=2)
            return LATE


def _run_pulp(api: Any, program: MixedProgram, limits: Limits, start: _Start) -> MipSolution:
    problem, variables = _pulp_model(api, program, limits.relaxed)
    for variable, value in zip(variables, start or (), strict=False):
        variable.setInitialValue(round(value) if variable.cat == "Integer" else value)
    command = api.PULP_CBC_CMD(
        # Several threads may end at different points.
        msg=False, threads=1, timeLimit=max(limits.time_limit_s, 0.1),
        gapRel=limits.relative_gap, gapAbs=limits.absolute_gap, maxNodes=limits.node_limit,
        warmStart=start is not None,
    )  # fmt: skip
    began = time.monotonic()
    problem.solve(command)
    cut_short = time.monotonic() - began >= limits.time_limit_s
    found = problem.sol_status in (api.LpSolutionOptimal, api.LpSolutionIntegerFeasible)
    optimal = problem.sol_status == api.LpSolutionOptimal and not cut_short
    values = [float(variable.value() or 0.0) for variable in variables] if found else None
    objective = math.inf
    if values is not None:
        objective = sum(c * x for c, x in zip(program.objective, values, strict=True))
    # PuLP does not pass on CBC's bound: optimal is within the gap.
    slack = max(abs(objective) * limits.relative_gap, limits.absolute_gap)
    bound = objective - slack if optimal else -math.inf
    is_infeasible = problem.status == api.LpStatusInfeasible
    return MipSolution(values, objective, bound, is_infeasible, optimal or is_infeasible)


def _pulp_model(api: Any, program: MixedProgram, relaxed: bool) -> tuple[Any, list[Any]]:
    problem = api.LpProblem("remat", api.LpMinimize)
    variables = [
        api.LpVariable(f"x{i}", low, high, "Integer" if whole and not relaxed else "Continuous")
        for i, (low, high, whole) in enumerate(
            zip(program.lower, program.upper, program.integer, strict=True)
        )
    ]
    problem += api.lpSum(c * x for c, x in zip(program.objective, variables, strict=True))
    for low, high, terms in program.rows:
        total = api.lpSum(coefficient * variables[index] for index, coefficient in terms)
        if low == high:
            problem += total == low
            continue
        if low > -math.inf:  # PuLP has no two-sided rows
            problem += total >= low
        if high < math.inf:
            problem += total <= high
    return problem, variables


def satisfies(program: MixedProgram, point: Sequence[float], tolerance: float = 1e-6) -> bool:
    bounds = zip(program.lower, point, program.upper, strict=True)
    if any(not low - tolerance <= x <= high + tolerance for low, x, high in bounds):
        return False
    for low, high, terms in program.rows:
        total = sum(coefficient * point[index] for index, coefficient in terms)
        if not low - tolerance <= total <= high + tolerance:
            return False
    return True
