"""Steps that update parameters during backward: no op reads a parameter after its update.

Solvers get a graph without this rule, in which updates stand behind captured readers. Where what
runs again reads a parameter later, the update waits, and its gradient lives longer. If that exceeds
the budget, the graph is solved again with those updates behind those reads, or asked for less as it
was. Few recomputations are that late.

Schedules of the least peak read most parameters late. So where nothing fits, the solver is asked a
little above the least budget without the rule, or halfway to the lowest known.

Bound: that without the rule. Where gradients are accumulated, what an update takes depends on those
before it: the bound is that of schedules in the captured order of updates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import ACCUMULATE, UPDATE, Op, TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import (
    Compute,
    Schedule,
    Step,
    fetched_value,
    freed_value,
    update_workspaces,
)
from remat.schedules.simulate import simulate
from remat.solver.problem import Problem
from remat.solver.reductions.reduction import Question, Reduction, Rest, within_its_limit
from remat.solver.result import (
    NONE_FITS,
    evaluate_schedule,
    least_budget_message,
    status_without,
    without_least_budget,
)
from remat.solver.search import Clock
from remat.solver.state import ops_of, schedule_of


def without_rule(graph: TrainingGraph) -> TrainingGraph:
    """The same step whose parameters may be read at any time."""
    resident = {value.name for value in graph.values if not value.producer}
    workspaces = update_workspaces(graph, (op.name for op in graph.ops))

    def freed(op: Op) -> Op:
        if op.target != UPDATE:
            return op
        # Without its parameter, no read comes too late.
        made = tuple(name for name in op.inputs if name not in resident)
        return msgspec.structs.replace(
            op, target=ACCUMULATE, inputs=made,
            workspace_bytes=workspaces.get(op.name, op.workspace_bytes),
        )  # fmt: skip

    return msgspec.structs.replace(graph, ops=tuple(map(freed, graph.ops)))


def made_late(graph: TrainingGraph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """`schedule` with its updates late enough; SolverError as of `late_steps`."""
    problem = Problem.of(graph)
    if schedule.moves:
        made = Schedule.for_graph(graph, late_steps(problem, schedule.steps))
    else:
        made = schedule_of(problem, late_sequence(problem, ops_of(problem, schedule)))
    return msgspec.structs.replace(
        made, budget_bytes=budget_bytes, solver=schedule.solver, options=schedule.options
    )


def with_updates_behind(graph: TrainingGraph, schedule: Schedule) -> TrainingGraph:
    """`graph` with those updates later that `schedule` runs too early."""
    first_runs: dict[str, int] = {}
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            first_runs.setdefault(step.op, at)
    updates = {op.name for op in graph.ops if op.target == UPDATE}
    others = [(at, name) for name, at in first_runs.items() if name not in updates]
    behind: dict[str, list[Op]] = {}
    for name, read_at in _last_reads(Problem.of(graph), schedule.steps).items():
        # What runs again for that op may read the parameter, and the gradient lives until then.
        if read_at > first_runs[name]:
            after = others[min(bisect_left(others, (read_at, "")), len(others) - 1)][1]
            behind.setdefault(after, []).append(graph.ops[graph.op_index[name]])
    moved = {op.name for ops in behind.values() for op in ops}
    kept = (op for op in graph.ops if op.name not in moved)
    placed = (one for op in kept for one in (op, *behind.get(op.name, ())))
    return msgspec.structs.replace(graph, ops=tuple(placed))


def late_sequence(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """`sequence` with each update behind the last op that reads a parameter of it."""
    ops = problem.graph.ops
    updates, made = {i for i, op in enumerate(ops) if op.target == UPDATE}, set(problem.names)
    runs = enumerate(sequence)
    last_read = {name: at for at, i in runs if i not in updates for name in ops[i].inputs}
    waiting, found = dict[int, list[int]](), list[int]()
    for at, i in enumerate(sequence):
        if i in updates:
            read = (name for name in ops[i].inputs if name not in made)
            if (until := max(last_read.get(name, 0) for name in read)) > at:
                waiting.setdefault(until, []).append(i)
                continue
        found.append(i)
        found += waiting.pop(at, ())
    return found


def late_steps(problem: Problem, steps: Sequence[Step]) -> list[Step]:
    """Of steps that copy; SolverError if a gradient is away too early."""
    until, made = _last_reads(problem, steps), set(problem.names)
    waiting, held, found = dict[int, list[Step]](), dict[str, int](), list[Step]()
    for at, step in enumerate(steps):
        name = step.op if isinstance(step, Compute) else step.value
        if isinstance(step, Compute) and until.get(name, 0) > at:
            gradients = made.intersection(problem.graph.ops[problem.graph.op_index[name]].inputs)
            held |= dict.fromkeys(gradients, until[name])  # its frees wait with the update
            waiting.setdefault(until[name], []).append(step)
        elif held.get(freed_value(step), 0) > at:
            waiting[held[freed_value(step)]].append(step)
        elif _brings(problem, step, held, at):
            raise SolverError(
                f"leave out host=, or the updates during backward: a gradient returns at {name} "
                "while its update waits for a later read of the parameter"
            )
        else:
            found.append(step)
        # A gradient that a run for other outputs makes anew is dropped later: only then.
        for value in _made(problem, step):
            frees = waiting.get(held.get(value, 0), [])
            frees[:] = (one for one in frees if freed_value(one) != value)
        found += waiting.pop(at, ())
    return found


def _made(problem: Problem, step: Step) -> tuple[str, ...]:
    if not isinstance(step, Compute):
        return ()
    return problem.graph.ops[problem.graph.op_index[step.op]].outputs


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
    made = _made(problem, step)
    return waiting.issuperset(made) if made else fetched_value(step) in waiting


_ROUNDS = 5  # how often a solver is asked for one budget
_MORE = (1 / 400, 1 / 100, 1 / 25)  # of the least peak without the rule, to ask for more
_PART = 1 / 2  # of the time that is left, for each solve
_Ask = Callable[[TrainingGraph, int, float], Result]


class UpdatePlacement(Reduction[None]):
    """Steps that update during backward; asks the rest for several budgets, without the rule."""

    def accepts(self, question: Question) -> bool:
        return has_updates(question.graph)

    def solve(self, question: Question, rest: Rest) -> Result:
        rest, unknown = within_its_limit(rest), replace(question, known_us=inf, at_hand=None)

        def ask(graph: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
            asked = replace(unknown, graph=graph, budget_bytes=budget_bytes, time_limit_s=limit_s)
            return rest(asked)

        return solve_with_updates(question.graph, question.budget_bytes, ask, question.time_limit_s)


def has_updates(graph: TrainingGraph) -> bool:
    return any(op.target == UPDATE for op in graph.ops)


def solve_with_updates(
    graph: TrainingGraph, budget_bytes: int, ask: _Ask, time_limit_s: float
) -> Result:
    """SolverError if all have a gradient away too early."""
    rounds = _Rounds(graph, budget_bytes, ask, Clock(time_limit_s))
    first = rounds.take(graph, budget_bytes)
    rounds.run(first)
    if rounds.best is None:
        if rounds.error is not None:
            raise rounds.error
        return first
    if rounds.fits:
        found = evaluate_schedule(  # solved without the rule, its bound holds here too
            graph, rounds.best, budget_bytes=budget_bytes, lower_bound_us=first.lower_bound_us,
            wall_s=rounds.clock.elapsed_s, cut_short=rounds.is_cut_short,
            message=rounds.message,
        )  # fmt: skip
        return msgspec.structs.replace(found, floor=first.floor)
    return rounds.without_schedule(first)


@dataclass(slots=True)
class _Rounds:
    graph: TrainingGraph
    budget_bytes: int
    ask: _Ask
    clock: Clock
    best: Schedule | None = None  # the fastest that fits, or the lowest; updates late enough
    best_key: tuple[int, float] = (0, 0.0)
    lost: Result | None = None  # the last outcome without a schedule, of `graph` itself
    error: SolverError | None = None  # why updates could not be made late enough
    is_cut_short: bool = False
    message: str = ""

    @property
    def best_bytes(self) -> int:
        """The peak of `best`, or the budget, if that is more."""
        return self.best_key[0]

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best_bytes == self.budget_bytes

    def take(self, placed: TrainingGraph, target_bytes: int) -> Result:
        """`placed` is `graph` with updates elsewhere; the outcome is kept if lower."""
        result = self.ask(without_rule(placed), target_bytes, _PART * max(self.clock.left_s, 0.0))
        self.is_cut_short |= result.status == "time limit"
        if result.schedule is None and placed is self.graph:
            self.lost = result
        schedule = result.schedule or result.least_schedule
        if schedule is not None:
            try:
                late = made_late(self.graph, schedule, self.budget_bytes)
            except SolverError as error:  # raised in the end, if nothing else is found
                self.error = error
                return result
            simulation = simulate(self.graph, late)
            # Within the budget, time counts.
            key = max(simulation.peak_bytes, self.budget_bytes), simulation.time_us
            if self.best is None or key < self.best_key:
                self.best, self.best_key, self.message = late, key, result.message
        return result

    def run(self, first: Result) -> None:
        result, placed, first_bytes = first, self.graph, self.best_bytes
        less_bytes = self.budget_bytes
        for _ in range(_ROUNDS - 1):
            if self.fits:
                break
            if self.clock.left_s <= 0:
                return
            if result.schedule is not None:
                placed = with_updates_behind(placed, result.schedule)  # it then counts waits
                target_bytes = self.budget_bytes
            elif placed is not self.graph and self.best is not None:
                # No schedule: the graph as it was is asked for less.
                less_bytes -= self.best_bytes - self.budget_bytes
                placed, target_bytes = self.graph, less_bytes
            else:
                break
            result = self.take(placed, target_bytes)
        if self.best is not None and not self.fits:
            # An ended search without the rule has none below the least it knows.
            is_open = first.schedule is not None or first.status == "time limit"
            self._ask_for_more(may_be_lower=is_open)
        elif placed is not self.graph and first_bytes and self.clock.left_s > 0:
            self.take(self.graph, 2 * self.budget_bytes - first_bytes)  # these may be faster

    def _ask_for_more(self, *, may_be_lower: bool) -> None:
        """Ask for more than the budget, so that the outcome names a low one that does."""
        low_bytes = self.budget_bytes
        least_bytes = self.lost.least_feasible_bytes if self.lost else 0
        for more in _MORE:  # a little more often allows updates that come early
            asked_bytes = int((1 + more) * least_bytes)
            if may_be_lower and not 0 < least_bytes <= asked_bytes < self.best_bytes:
                asked_bytes = (low_bytes + self.best_bytes) // 2
            if self.clock.left_s <= 0 or asked_bytes >= self.best_bytes:
                return
            result = self.take(self.graph, asked_bytes)
            if result.schedule is not None and self.best_bytes > asked_bytes:
                self.take(with_updates_behind(self.graph, result.schedule), asked_bytes)
            low_bytes = asked_bytes if asked_bytes < self.best_bytes else low_bytes

    def without_schedule(self, first: Result) -> Result:
        assert self.best is not None
        lost = self.lost or first
        found = evaluate_schedule(
            self.graph, self.best, budget_bytes=self.budget_bytes, lower_bound_us=0.0,
            wall_s=self.clock.elapsed_s,
        )  # fmt: skip
        is_proved = first.schedule is None and first.message.startswith(NONE_FITS)
        # That nothing fits in less is no news of this budget.
        is_own = lost is first or lost.status == "time limit"
        rest = without_least_budget(lost.message) if is_own else ""
        text = least_budget_message(self.budget_bytes, self.best_bytes, rest, is_proved=is_proved)
        return msgspec.structs.replace(
            found, status=status_without(is_proved=is_proved, is_late=self.is_cut_short),
            floor=lost.floor, least_bound_bytes=lost.least_bound_bytes,
            lower_bound_us=first.lower_bound_us, message=text,
        )  # fmt: skip
