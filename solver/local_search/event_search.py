"""Solves one neighbourhood by CP-SAT. The one file that speaks to OR-Tools CP-SAT for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from remat.solver.local_search.events import ALWAYS, NEVER, EventProgram, Runs, again_us

LEAST_EFFORT = 0.05
"""What a try counts as at least: its program has to be built."""
COST_UNITS = 10_000_000
"""Units into which the time of the step is cut: CP-SAT counts in integers."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What a try found.

    `runs` is None where there is nothing better; `finished` says whether the neighbourhood
    was searched to its end; `effort` is CP-SAT's deterministic time, and a little more.
    """

    runs: Runs | None
    finished: bool
    effort: float = LEAST_EFFORT


@dataclass(frozen=True, slots=True)
class TryLimits:
    """How long a try may take; `deterministic` is in CP-SAT's own unit, about a second."""

    deterministic: float
    seconds: float
    seed: int = 0


class Running:
    """The CP-SAT solvers at work, so that all of them can be stopped."""

    def __init__(self) -> None:
        self._solvers: list[Any] = []
        self._stopped = False

    def add(self, solver: Any) -> bool:
        """Take note of `solver`; return whether it may begin."""
        self._solvers.append(solver)
        return not self._stopped

    def stop(self) -> None:
        """Stop all, and let none begin."""
        self._stopped = True
        for solver in self._solvers:
            solver.stop_search()


def solve_events(
    program: EventProgram,
    base: Runs,
    fixed: Sequence[int],
    below_us: float,
    effort: TryLimits,
    running: Running,
) -> Tried:
    """Search for runs that cost less than `below_us` in all: `base` with the program's choice.

    `fixed` are the ops that the program does not decide: their runs are those of `base`.
    """
    if program.is_empty:
        return Tried(None, True)
    from ortools.sat.python import cp_model  # pyright: ignore[reportMissingTypeStubs]

    api = cast(Any, cp_model)
    model, variables = _model(api, program, base, fixed, below_us)
    solver = api.CpSolver()
    if model is None or not running.add(solver):
        return Tried(None, True)
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = effort.seed
    solver.parameters.linearization_level = 2
    solver.parameters.catch_sigint_signal = False
    solver.parameters.max_deterministic_time = effort.deterministic
    solver.parameters.max_time_in_seconds = max(effort.seconds, 0.01)
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.max_presolve_iterations = 1
    status = solver.solve(model)
    finished = status in (api.OPTIMAL, api.INFEASIBLE)
    spent = LEAST_EFFORT + solver.response_proto.deterministic_time
    if status not in (api.OPTIMAL, api.FEASIBLE):
        return Tried(None, finished, spent)
    chosen = {event for x, event in program.run_of.items() if solver.boolean_value(variables[x])}
    runs = _merged(base, fixed, chosen)
    is_cheaper = again_us(program.problem, runs) < below_us
    return Tried(runs if is_cheaper else None, finished, spent)


def _model(
    api: Any, program: EventProgram, base: Runs, fixed: Sequence[int], below_us: float
) -> tuple[Any, list[Any]]:
    model = api.CpModel()
    variables = [model.new_bool_var("") for _ in program.costs]
    for variable, bit in zip(variables, program.hint, strict=True):
        model.add_hint(variable, bit)
    for left, right in program.implications:
        _imply(model, variables, left, right)
    for terms, room in program.rows:
        _row(api, model, variables, terms, room)
    unit_us = sum(program.problem.cost_us) / COST_UNITS or 1.0
    scaled = [(x, round(cost / unit_us)) for x, cost in enumerate(program.costs) if cost]
    objective = api.LinearExpr.weighted_sum(
        [variables[x] for x, _ in scaled], [units for _, units in scaled]
    )
    kept = set(fixed)
    spent_us = sum(program.problem.cost_us[op] for again in base for op in again if op in kept)
    room_us = below_us - spent_us
    if room_us <= 0:
        return None, variables
    if math.isfinite(room_us):
        model.add(objective <= math.ceil(room_us / unit_us) - 1)
    model.minimize(objective)
    return model, variables


def _imply(model: Any, variables: list[Any], left: int, right: Sequence[int]) -> None:
    if left == NEVER:
        return
    clause = [variables[x] for x in right if x != NEVER]
    if left != ALWAYS:
        clause.append(~variables[left])
    model.add_bool_or(clause)


def _row(
    api: Any, model: Any, variables: list[Any], terms: Sequence[tuple[int, int]], room: int
) -> None:
    sizes = [size_bytes for _, size_bytes in terms]
    unit = math.gcd(*sizes) or 1
    total = api.LinearExpr.weighted_sum(
        [variables[x] for x, _ in terms], [size_bytes // unit for size_bytes in sizes]
    )
    model.add(total <= room // unit)


def _merged(base: Runs, fixed: Sequence[int], chosen: set[tuple[int, int]]) -> Runs:
    kept = set(fixed)
    merged = [[op for op in again if op in kept] for again in base]
    for stage, op in sorted(chosen):
        merged[stage].append(op)
    return [sorted(again) for again in merged]
