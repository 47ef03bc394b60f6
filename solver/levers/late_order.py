"""A step without the rule of updates, and its schedules with updates late enough to keep it.

The rule: no op reads a parameter after its update. The solve of `late_updates` goes from one to
the other and back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import DELIVER, UPDATE, Op, TrainingGraph
from remat.schedules.schedule import Compute, Schedule, Step, brought, dropped
from remat.schedules.update_workspaces import update_workspaces
from remat.solver.problem import Problem
from remat.solver.sequence import ops_of, schedule_of


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


def made_late(graph: TrainingGraph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """`schedule` of the graph without the rule as one of `graph`, updates late enough.

    Raises
    ------
    SolverError : see `late_steps`.
    """
    problem = Problem.of(graph)
    if schedule.moves:
        made = Schedule.for_graph(graph, late_steps(problem, schedule.steps))
    else:
        made = schedule_of(problem, late_sequence(problem, ops_of(problem, schedule)))
    return msgspec.structs.replace(
        made, budget_bytes=budget_bytes, solver=schedule.solver, options=schedule.options
    )


def with_updates_behind(graph: TrainingGraph, schedule: Schedule) -> TrainingGraph:
    """`graph` with each update that `schedule` runs too early behind the op that comes after it.

    What is computed again for that op may then read the parameter, and the gradient counts as live
    until the op has run.

    Parameters
    ----------
    schedule : of `graph` without the rule.
    """
    first_runs = _first_runs(schedule)
    updates = {op.name for op in graph.ops if op.target == UPDATE}
    others = [(at, name) for name, at in first_runs.items() if name not in updates]
    behind: dict[str, list[Op]] = {}
    for name, read_at in _last_reads(Problem.of(graph), schedule.steps).items():
        if read_at > first_runs[name]:
            after = others[min(bisect_left(others, (read_at, "")), len(others) - 1)][1]
            behind.setdefault(after, []).append(graph.ops[graph.op_index[name]])
    moved = {op.name for ops in behind.values() for op in ops}
    kept = (op for op in graph.ops if op.name not in moved)
    placed = (one for op in kept for one in (op, *behind.get(op.name, ())))
    return msgspec.structs.replace(graph, ops=tuple(placed))


def _first_runs(schedule: Schedule) -> dict[str, int]:
    """For each op the step that runs it first, in the order of the steps."""
    found: dict[str, int] = {}
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            found.setdefault(step.op, at)
    return found


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


def late_steps(problem: Problem, steps: Sequence[Step]) -> list[Step]:
    """As `late_sequence`, of steps that copy: an update takes the frees of its gradient along.

    Raises
    ------
    SolverError : a gradient leaves the device, or is made again, before its update may come.
    """
    until, made = _last_reads(problem, steps), set(problem.names)
    waiting: dict[int, list[Step]] = {}
    held: dict[str, int] = {}
    found: list[Step] = []
    for at, step in enumerate(steps):
        name = step.op if isinstance(step, Compute) else step.value
        if isinstance(step, Compute) and until.get(name, 0) > at:
            gradients = made.intersection(problem.graph.ops[problem.graph.op_index[name]].inputs)
            held |= dict.fromkeys(gradients, until[name])
            waiting.setdefault(until[name], []).append(step)
        elif held.get(dropped(step), 0) > at:
            waiting[held[dropped(step)]].append(step)
        elif _brings(problem, step, held, at):
            raise SolverError(
                f"a gradient returns at {name} while its update waits for a later read of the "
                "parameter: leave out host=, or the updates during backward"
            )
        else:
            found.append(step)
        found += waiting.pop(at, ())
    return found


def _last_reads(problem: Problem, steps: Sequence[Step]) -> dict[str, int]:
    """For each update the step that reads a parameter of it last."""
    graph, made = problem.graph, set(problem.names)
    updates = {op.name: op for op in graph.ops if op.target == UPDATE}
    last_read: dict[str, int] = {}
    for at, step in enumerate(steps):
        if isinstance(step, Compute) and step.op not in updates:
            last_read |= dict.fromkeys(graph.ops[graph.op_index[step.op]].inputs, at)
    return {
        name: max((last_read.get(v, 0) for v in op.inputs if v not in made), default=0)
        for name, op in updates.items()
    }


def _brings(problem: Problem, step: Step, held: dict[str, int], at: int) -> bool:
    """Whether a step brings back a value that still waits to be dropped."""
    waiting = {name for name, end in held.items() if end > at}
    if isinstance(step, Compute):
        outputs = problem.graph.ops[problem.graph.op_index[step.op]].outputs
        return bool(outputs) and waiting.issuperset(outputs)
    return brought(step) in waiting
