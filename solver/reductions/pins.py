"""Pins: parts of the model that the user wants kept, or recomputed.

Pins are another graph, so any solver does the work. Kept ops must not run twice. A recomputed op
that backward needs has a clone right before its first reader there, through which backward reads. A
schedule of that graph is one of the real one, clones being second runs. It may still carry a
forbidden value, to recompute an op without a clone: then runs are put in, and if that exceeds the
budget the solver is asked for less. Needless runs are left out last.

Bound: the larger of every op and clone once, and of `cut` with `keep` alone. The solver's bound on
the graph with clones does not hold, since it fixes when a clone first runs. Shortcomings: with
`recompute` the gap is rarely closed.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from msgspec import structs

from remat.formats import exact_bytes_text
from remat.graph_capture.errors import option
from remat.graph_capture.graph import KEPT, Op, TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Option, Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.schedules.value_report.globs import Pins, may_run_twice
from remat.solver.bounds.any_order_cut import free_bound_us
from remat.solver.bounds.least_peak import LEAST_BOUND
from remat.solver.problem import Problem
from remat.solver.reductions.reduction import Question, Reduction, Rest
from remat.solver.result import KNOWN, evaluate_schedule, without_fit
from remat.solver.search import Clock, Progress, note_interrupt
from remat.solver.state import schedule_of
from remat.solver.stopping import FIRST_PINNED, LEFT_OUT, PINNED_BOUND, PINNED_SOLVE, TIGHTER
from remat.solver.table import make_solver

# The clone of an op reads the clones of what it reads. Back on the real graph it is a second run.

CLONE = "@again"  # ends names of clones and their values; no fx node has such a name


def _without_clones(text: str) -> str:
    """The name of the op or value that a clone stands for; also for several in a sentence."""
    return text.replace(CLONE, "")


def _message_without_clones(message: str) -> str:
    sentences = _without_clones(message).split(". ")
    # That bound holds for the graph with clones alone.
    return ". ".join(s for s in sentences if not s.startswith(LEAST_BOUND))


def with_clones(graph: TrainingGraph, again: Set[int]) -> TrainingGraph:
    """`graph` in which backward reads what the ops of `again` make through clones of them."""
    problem = Problem.of(graph)
    renamed = {v: v + CLONE for i in sorted(again) for v in graph.ops[i].outputs}
    done = bytearray(problem.n_ops)
    ops = list(graph.ops[: graph.n_forward])
    for i in range(graph.n_forward, problem.n_ops):
        missing = _missing_below(problem, i, again, done)
        ops += [_clone(graph.ops[below], renamed) for below in missing]
        ops.append(_reading_clones(graph.ops[i], renamed))
    values = [
        structs.replace(value, name=value.name + CLONE, producer=value.producer + CLONE)
        for value in graph.values
        if value.producer and done[graph.op_index[value.producer]]
    ]
    return structs.replace(graph, ops=tuple(ops), values=(*graph.values, *values))


def _clone(op: Op, renamed: dict[str, str]) -> Op:
    outputs = tuple(renamed[v] for v in op.outputs)
    return structs.replace(
        _reading_clones(op, renamed), name=op.name + CLONE, phase="backward", outputs=outputs
    )


def _reading_clones(op: Op, renamed: dict[str, str]) -> Op:
    return structs.replace(op, inputs=tuple(renamed.get(v, v) for v in op.inputs))


def _missing_below(problem: Problem, root: int, again: Set[int], done: bytearray) -> list[int]:
    """Ops of `again` that `root` needs and are not `done`, each after what it reads; marks them."""
    order: list[int] = []  # no recursion: as deep as the graph
    stack = [(root, 0)]
    while stack:
        op, position = stack.pop()
        reads = problem.inputs[op]
        while position < len(reads):
            below = problem.producer[reads[position]]
            position += 1
            if below in again and not done[below]:
                done[below] = 1
                stack += [(op, position), (below, 0)]
                break
        else:
            if op != root:
                order.append(op)
    return order


def _sequence_without_clones(problem: Problem, schedule: Schedule, again: Set[int]) -> list[int]:
    """The runs of `schedule`, of a graph with clones, as a sequence of the real graph."""
    index = problem.graph.op_index
    runs = [index[_without_clones(s.op)] for s in schedule.steps if isinstance(s, Compute)]
    waiting = set(range(problem.n_forward))
    fresh = bytearray(problem.n_ops)
    sequence: list[int] = []
    for op in runs:
        if not waiting:
            # A solver may carry forward's value for an op without a clone: runs are put in.
            sequence += _missing_below(problem, op, again, fresh)
            fresh[op] = 1
        sequence.append(op)
        waiting.discard(op)
    return sequence


def _leave_out_runs(
    problem: Problem, sequence: Sequence[int], again: Set[int], budget_bytes: int, limit_s: float
) -> list[int]:
    """Leave out runs whose values fit as well, dearest first; the first of `again` stays."""
    clock = Clock(limit_s)
    spare = _repeats(problem, sequence, again)
    spare.sort(key=lambda position: (-problem.cost_us[sequence[position]], position))
    left_out: set[int] = set()
    for position in spare[: LEFT_OUT.at(problem.n_ops)]:
        if clock.left_s < 0:
            break
        trial = _without(sequence, left_out | {position})
        if simulate(problem.graph, schedule_of(problem, trial)).peak_bytes <= budget_bytes:
            left_out.add(position)
    return _without(sequence, left_out)


def _repeats(problem: Problem, sequence: Sequence[int], again: Set[int]) -> list[int]:
    """Positions of runs that are neither the first nor, for `again`, the first in backward."""
    waiting = set(range(problem.n_forward))
    ran, ran_in_backward = bytearray(problem.n_ops), bytearray(problem.n_ops)
    found: list[int] = []
    for position, op in enumerate(sequence):
        must_stay = not waiting and op in again and not ran_in_backward[op]
        if ran[op] and not must_stay:
            found.append(position)
        ran[op] = 1
        ran_in_backward[op] = not waiting
        waiting.discard(op)
    return found


def _without(sequence: Sequence[int], left_out: Set[int]) -> list[int]:
    return [op for position, op in enumerate(sequence) if position not in left_out]


def freed_graph(graph: TrainingGraph, recompute: tuple[str, ...]) -> TrainingGraph:
    """`graph` in which the custom ops that `recompute` names may run twice."""
    named = {op.name for op in graph.ops if may_run_twice(op, recompute)}
    ops = [structs.replace(op, no_recompute="") if op.name in named else op for op in graph.ops]
    return structs.replace(graph, ops=tuple(ops)) if named else graph


def kept_graph(graph: TrainingGraph, kept: dict[str, str]) -> TrainingGraph:
    ops = [
        structs.replace(op, no_recompute=f"{KEPT} {option('keep', kept[op.name])}")
        if op.name in kept and not op.no_recompute
        else op
        for op in graph.ops
    ]
    return structs.replace(graph, ops=tuple(ops))


class _Stamp(NamedTuple):
    graph: TrainingGraph
    budget_bytes: int
    named: dict[str, Option]  # the pins, for its options

    def on(self, schedule: Schedule) -> Schedule:
        return Schedule.for_graph(
            self.graph, schedule.steps, budget_bytes=self.budget_bytes, solver=schedule.solver,
            options=schedule.options | self.named,
        )  # fmt: skip


@dataclass(frozen=True)
class PinnedOps(Reduction[_Stamp]):
    """The schedule of least time that keeps the pins; its options name the globs."""

    pins: Pins | None = None  # pinned one by one, in place of the globs of a question

    def accepts(self, question: Question) -> bool:
        return bool(question.keep or question.recompute or self.pins)

    def apply(self, question: Question) -> tuple[Question, _Stamp]:
        graph = kept_graph(question.graph, self._pins(question).kept)  # it must not run twice
        limit_s = PINNED_SOLVE.of(question.time_limit_s, question.time_limit_s)
        return replace(_unpinned(question), graph=graph, time_limit_s=limit_s), _stamp(question)

    def invert(self, schedule: Schedule, inverse: _Stamp) -> Schedule:
        return inverse.on(schedule)  # kept ops run once on the real graph too

    def solve(self, question: Question, rest: Rest) -> Result:
        question = replace(question, graph=freed_graph(question.graph, question.recompute))
        pins = self._pins(question)
        if not pins.again:  # with `keep` alone there are no clones, and one solve does
            return super().solve(question, rest)
        return _PinnedSearch(question, pins, rest).solve()

    def _pins(self, question: Question) -> Pins:
        return self.pins or Pins.of(question.graph, question.keep, question.recompute)


def _unpinned(question: Question) -> Question:
    return replace(question, keep=(), recompute=(), known_us=inf)


def _stamp(question: Question) -> _Stamp:
    asked = {"keep": question.keep, "recompute": question.recompute}
    named: dict[str, Option] = {name: ", ".join(globs) for name, globs in asked.items() if globs}
    return _Stamp(question.graph, question.budget_bytes, named)


class _PinnedSearch:
    """Asks for the graph with clones, for less and less, until its schedule fits."""

    def __init__(self, question: Question, pins: Pins, rest: Rest) -> None:
        self.question, self.rest, self.clock = question, rest, Clock(question.time_limit_s)
        self.graph, self.budget_bytes, self.cut_short = question.graph, question.budget_bytes, False
        self.kept = kept_graph(self.graph, pins.kept)
        self.problem = Problem.of(self.graph)
        self.again = frozenset(self.graph.op_index[name] for name in pins.again)
        self.cloned_graph = with_clones(self.kept, self.again)

    def solve(self) -> Result:
        target_bytes, limit_s = self.budget_bytes, FIRST_PINNED.of(self.clock.time_limit_s)
        for _ in range(TIGHTER.most):
            result = self._ask(self.cloned_graph, target_bytes, limit_s)
            if result.schedule is None:
                return self._with_least(result)
            sequence, found = self._renewed(result.schedule)
            if found.peak_bytes <= self.budget_bytes:
                return self._finished(result, sequence)
            over_bytes = found.peak_bytes - self.budget_bytes
            # Less by the runs put in, and by 2 % at least, to get on.
            target_bytes -= max(over_bytes, target_bytes // 50, 1)
            limit_s = self.clock.left_s / 2
        # At 0 the solver names the least peak that it knows.
        return self._with_least(self._ask(self.cloned_graph, 0, self.clock.left_s / 2))

    def _with_least(self, lost: Result) -> Result:
        """The outcome for the least peak that the solver names on the graph with clones."""
        least_bytes = lost.least_feasible_bytes or lost.peak_bytes
        result = (
            self._ask(self.cloned_graph, least_bytes, self.clock.left_s) if least_bytes else lost
        )
        if result.schedule is None:
            return structs.replace(  # proofs of the graph with clones do not hold
                result, budget_bytes=self.budget_bytes, least_feasible_bytes=0, floor=None,
                least_schedule=None, held_at_peak=(), lower_bound_us=self.graph.time_us,
                least_bound_bytes=0, wall_s=self.clock.elapsed_s,
                message=_message_without_clones(result.message),
            )  # fmt: skip
        sequence, found = self._renewed(result.schedule)
        if found.peak_bytes <= self.budget_bytes:
            return self._finished(result, sequence)
        text = (
            f"no schedule found that fits {exact_bytes_text(self.budget_bytes)} with these pins; "
            f"{found.peak_bytes} {KNOWN}"
        )
        rest = _message_without_clones(lost.message)
        found_none = without_fit(
            self.graph, self._schedule(sequence, result.schedule), found, self.budget_bytes,
            self.clock.elapsed_s, f"{text}. {rest}" if lost.message else text,
        )  # fmt: skip
        return structs.replace(found_none, status=lost.status)

    def _finished(self, result: Result, sequence: Sequence[int]) -> Result:
        assert result.schedule is not None
        bound_us = self.cloned_graph.time_us  # proved for any schedule that keeps the pins
        schedule = self._schedule(sequence, result.schedule)
        try:
            shorter = _leave_out_runs(
                self.problem, sequence, self.again, self.budget_bytes, self.clock.left_s
            )
            schedule = self._schedule(shorter, result.schedule)
            if simulate(self.graph, schedule).time_us > bound_us * (1 + 1e-9):  # else it is optimal
                bound_us = max(bound_us, self._bound_with_keep_us())
        except KeyboardInterrupt:
            note_interrupt()  # what there is fits
            self.cut_short = True
        return evaluate_schedule(
            self.graph, schedule, budget_bytes=self.budget_bytes, lower_bound_us=bound_us,
            wall_s=self.clock.elapsed_s, cut_short=self.cut_short,
            message=_without_clones(result.message),
        )  # fmt: skip

    def _bound_with_keep_us(self) -> float:
        if (limit_s := PINNED_BOUND.of(self.clock.left_s)) <= 0:
            return 0.0
        if self.question.options.get("order") == "free":
            return free_bound_us(self.kept, self.budget_bytes, time_limit_s=limit_s)
        cut = make_solver("cut", time_limit_s=limit_s)
        return cut.solve(self.kept, self.budget_bytes).lower_bound_us

    def _ask(self, graph: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
        limit_s = PINNED_SOLVE.of(limit_s, self.clock.time_limit_s)
        listener = self._tell if self.question.progress else None
        asked = replace(_unpinned(self.question), progress=listener, time_limit_s=limit_s)
        result = self.rest(replace(asked, graph=graph, budget_bytes=budget_bytes))
        self.cut_short = self.cut_short or result.status == "time limit"
        return result

    def _tell(self, state: Progress) -> None:
        assert self.question.progress is not None
        scale = self.cloned_graph.time_us / self.graph.time_us if self.graph.time_us else 1.0
        best = None if state.best_overhead is None else (1 + state.best_overhead) * scale - 1
        doing = _without_clones(state.doing)
        self.question.progress(Progress(self.clock.elapsed_s, best, scale - 1, doing))

    def _renewed(self, schedule: Schedule) -> tuple[list[int], Simulation]:
        sequence = _sequence_without_clones(self.problem, schedule, self.again)
        return sequence, simulate(self.graph, self._schedule(sequence, schedule))

    def _schedule(self, sequence: Sequence[int], source: Schedule) -> Schedule:
        made = schedule_of(self.problem, sequence)
        return _stamp(self.question).on(structs.replace(source, steps=made.steps))
