"""Steps that update parameters during backward: no op reads a parameter after its update.

Solvers do not know of this rule. They solve a graph without it, in which updates stand behind all
captured readers of their parameters; what they compute again may read one later. Then the update
waits for it, and its gradient lives longer. If that exceeds the budget, the solver is asked again
for less. Few recomputations are that late: what backward computes again it needs for gradients
that come before those of the parameter.

Bound: that of the graph without the rule, which every schedule that keeps the rule follows too.
Where gradients are accumulated, what an update takes depends on those before it: the bound is then
that of schedules that keep the captured order of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from remat.graph_capture.graph import DELIVER, UPDATE, Op, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.update_workspaces import update_workspaces
from remat.solver.problem import Problem
from remat.solver.result import Result, infeasible, judged
from remat.solver.sequence import ops_of, schedule_of

ROUNDS = 4
"""How often a solver is asked for less."""
Ask = Callable[[TrainingGraph, int], Result]


def has_updates(graph: TrainingGraph) -> bool:
    """Whether the step updates parameters."""
    return any(op.target == UPDATE for op in graph.ops)


def without_rule(graph: TrainingGraph) -> TrainingGraph:
    """The same step whose parameters may be read at any time."""
    resident = {value.name for value in graph.values if not value.producer}
    workspaces = update_workspaces(graph, (op.name for op in graph.ops))

    def freed(op: Op) -> Op:
        if op.target != UPDATE:
            return op
        made = tuple(name for name in op.inputs if name not in resident)
        return msgspec.structs.replace(
            op, target=DELIVER, inputs=made,
            workspace_bytes=workspaces.get(op.name, op.workspace_bytes),
        )  # fmt: skip

    return msgspec.structs.replace(graph, ops=tuple(map(freed, graph.ops)))


def solve_with_updates(graph: TrainingGraph, budget_bytes: int, ask: Ask) -> Result:
    """The outcome of a solver for a step with updates.

    Parameters
    ----------
    ask : solves a graph for a budget in bytes.
    """
    free, target_bytes = without_rule(graph), budget_bytes
    first = result = ask(free, budget_bytes)
    late = _late(graph, result, budget_bytes)
    for _ in range(ROUNDS):
        if late is None:
            return result
        over_bytes = simulate(graph, late).peak_bytes - budget_bytes
        if over_bytes <= 0 or result.schedule is None:
            break
        target_bytes -= over_bytes
        result = ask(free, target_bytes)
        late = _late(graph, result, budget_bytes)
    if late is None:
        return result
    if result.schedule is None and simulate(graph, late).peak_bytes > budget_bytes:
        return _infeasible(graph, late, result, budget_bytes)
    found = judged(
        graph, late, budget_bytes=budget_bytes, lower_bound_us=first.lower_bound_us,
        wall_s=result.wall_s, cut_short=result.status == "time limit", message=result.message,
    )  # fmt: skip
    return msgspec.structs.replace(found, floor=result.floor)


def _infeasible(graph: TrainingGraph, late: Schedule, lost: Result, budget_bytes: int) -> Result:
    found = infeasible(graph, late, simulate(graph, late), budget_bytes, lost.wall_s, lost.message)
    return msgspec.structs.replace(
        found, status=lost.status, floor=lost.floor, least_bound_bytes=lost.least_bound_bytes,
        lower_bound_us=lost.lower_bound_us,
    )  # fmt: skip


def _late(graph: TrainingGraph, found: Result, budget_bytes: int) -> Schedule | None:
    """What was found for the graph without the rule as a schedule of `graph`, updates late enough.

    None where it has no schedule at all.
    """
    schedule = found.schedule or found.least_schedule
    if schedule is None:
        return None
    problem = Problem.of(graph)
    made = schedule_of(problem, late_sequence(problem, ops_of(problem, schedule)))
    return msgspec.structs.replace(
        made, budget_bytes=budget_bytes, solver=schedule.solver, options=schedule.options
    )


def late_sequence(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """`sequence` with each update behind the last op that reads a parameter of it."""
    ops = problem.graph.ops
    updates, made = {i for i, op in enumerate(ops) if op.target == UPDATE}, set(problem.names)
    last_read = {
        name: at for at, i in enumerate(sequence) if i not in updates for name in ops[i].inputs
    }
    waiting: dict[int, list[int]] = {}
    found: list[int] = []
    for at, i in enumerate(sequence):
        if i in updates:
            read = (name for name in ops[i].inputs if name not in made)
            until = max(last_read.get(name, 0) for name in read)
            if until > at:
                waiting.setdefault(until, []).append(i)
                continue
        found.append(i)
        found += waiting.pop(at, ())
    return found
