"""Steps that update parameters during backward: no op reads a parameter after its update.

Solvers do not know of this rule. They solve a graph without it, in which updates stand behind all
captured readers of their parameters; what they compute again may read one later. Then the update
waits for it, and its gradient lives longer. If that exceeds the budget, the solver is asked again
for less. Few recomputations are that late: what backward computes again it needs for gradients
that come before those of the parameter.

Schedules of the least peak compute most again, and read most parameters late. A little more than
that peak often allows one whose updates come early. So where nothing fits, the solver is asked at a
few budgets above the least of the graph without the rule, and the lowest outcome is taken.

Bound: that of the graph without the rule, which every schedule that keeps the rule follows too.
Where gradients are accumulated, what an update takes depends on those before it: the bound is then
that of schedules that keep the captured order of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import DELIVER, UPDATE, Op, TrainingGraph
from remat.schedules.schedule import Compute, Schedule, Step, brought, dropped
from remat.schedules.simulate import simulate
from remat.schedules.update_workspaces import update_workspaces
from remat.solver.clock import Clock
from remat.solver.problem import Problem
from remat.solver.result import Result, infeasible, judged
from remat.solver.sequence import ops_of, schedule_of

ROUNDS = 4
"""How often a solver is asked for less."""
MORE = (1 / 400, 1 / 100, 1 / 25)
"""Parts of the least peak without the rule by which a solver is asked for more."""
FIRST_PART = 2 / 3
"""Of the time limit, for the first solve; the others share what is left."""
Ask = Callable[[TrainingGraph, int, float], Result]


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


def solve_with_updates(
    graph: TrainingGraph, budget_bytes: int, ask: Ask, time_limit_s: float
) -> Result:
    """The outcome of a solver for a step with updates.

    Parameters
    ----------
    ask : solves a graph for a budget in bytes within so many seconds.
    """
    clock = Clock(time_limit_s)
    free, target_bytes = without_rule(graph), budget_bytes
    first = result = ask(free, budget_bytes, FIRST_PART * time_limit_s)
    late = _late(graph, result, budget_bytes)
    for i in range(ROUNDS):
        if late is None:
            break
        over_bytes = simulate(graph, late).peak_bytes - budget_bytes
        if over_bytes <= 0 or result.schedule is None:
            break
        target_bytes -= over_bytes
        result = ask(free, target_bytes, max(clock.left_s, 0.0) / (ROUNDS - i))
        late = _late(graph, result, budget_bytes)
    if late is None:
        return msgspec.structs.replace(result, budget_bytes=budget_bytes)
    if result.schedule is None:
        late = _lower(graph, free, late, result, ask, clock)
        if simulate(graph, late).peak_bytes > budget_bytes:
            return _infeasible(graph, late, result, budget_bytes)
    found = judged(
        graph, late, budget_bytes=budget_bytes, lower_bound_us=first.lower_bound_us,
        wall_s=result.wall_s, cut_short=result.status == "time limit", message=result.message,
    )  # fmt: skip
    return msgspec.structs.replace(found, floor=result.floor)


def _lower(
    graph: TrainingGraph, free: TrainingGraph, late: Schedule, lost: Result, ask: Ask, clock: Clock
) -> Schedule:
    """`late`, or a schedule of a lower peak, from asking for a little more than the least.

    Parameters
    ----------
    free : `graph` without the rule. lost : its outcome, which names the least.
    """
    least_bytes, budget_bytes = lost.least_feasible_bytes, late.budget_bytes
    best_bytes = simulate(graph, late).peak_bytes
    for i, more in enumerate(MORE):
        asked_bytes = int((1 + more) * least_bytes)
        if clock.left_s <= 0 or asked_bytes >= best_bytes:
            break
        asked = ask(free, asked_bytes, clock.left_s / (len(MORE) - i))
        found = _late(graph, asked, budget_bytes)
        if found is not None and (found_bytes := simulate(graph, found).peak_bytes) < best_bytes:
            late, best_bytes = found, found_bytes
    return late


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
    if schedule.moves:
        made = Schedule.for_graph(graph, late_steps(problem, schedule.steps))
    else:
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
