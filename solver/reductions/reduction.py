"""Levers around a solver: a lever changes a question, has the rest answer it, and changes it back.

Such a pair of maps is a reduction, as in cvxpy, whose chain of reductions this follows.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, TypeVar

import msgspec

from remat.graph_capture.errors import GraphError, SolverError, option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.levers import REDUCTIONS, AppliedLever, Lever, attribute_at
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver.problem import can_copy
from remat.solver.result import evaluate_schedule, with_time_limit_message
from remat.solver.search import Clock, Listener, one_job
from remat.solver.table import make_solver, option_names, plans_copies

_Inverse = TypeVar("_Inverse")
VARIABLE = "REMAT_CHECK"  # where it is 1, each lever and each answer is checked
_SAME = 1e-9  # largest relative difference of two times that come from the same sum


@dataclass(frozen=True)
class Question:
    """What a solve is asked; the fields are the arguments of `remat.solver.solve_within`."""

    graph: TrainingGraph
    budget_bytes: int
    solver: str = "auto"
    time_limit_s: float = 60.0
    progress: Listener | None = None
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    known_us: float = inf
    at_hand: Result | None = None
    # Fields of the solver; levers take theirs out.
    options: Mapping[str, object] = field(default_factory=dict[str, object])


Rest = Callable[[Question], Result]  # levers behind one in the chain, and in the end the solver


class Reduction(ABC, Generic[_Inverse]):
    """One lever. If it asks the rest several times, it defines `solve` and judges the answer."""

    @abstractmethod
    def accepts(self, question: Question) -> bool:
        """If not, the question passes unchanged."""

    def apply(self, question: Question) -> tuple[Question, _Inverse]:
        """The question for the rest, without this lever's part; and what `invert` needs."""
        raise NotImplementedError

    def invert(self, schedule: Schedule, inverse: _Inverse) -> Schedule:
        """A schedule of the changed graph as one of the graph that was asked."""
        raise NotImplementedError

    def bound_us(self, found: Result, inverse: _Inverse) -> float:
        """What `found` proves of the graph that was asked, in microseconds; 0 for nothing."""
        return found.lower_bound_us  # no schedule that the lever allows is faster

    def solve(self, question: Question, rest: Rest) -> Result:
        """The answer, judged on the question's graph, with a bound for it; `rest` is behind."""
        clock = Clock(question.time_limit_s)
        changed, inverse = self.apply(question)
        if (found := rest(changed)).schedule is None:
            least = found.least_schedule and self.invert(found.least_schedule, inverse)
            return msgspec.structs.replace(found, least_schedule=least)
        answer = evaluate_schedule(
            question.graph, self.invert(found.schedule, inverse),
            budget_bytes=question.budget_bytes, lower_bound_us=self.bound_us(found, inverse),
            wall_s=clock.elapsed_s, cut_short=found.status == "time limit", message=found.message,
        )  # fmt: skip
        return msgspec.structs.replace(answer, floor=found.floor)


@dataclass(frozen=True)
class _OtherOps(Reduction[tuple[AppliedLever, str]]):
    """A lever that changes which ops run, as the `change` of its row says; regions stay whole. The
    schedule names it with all that turns the captured graph into the planned one, so it is judged
    without the lever. The emitter must make ops of the same names, reads and values."""

    name: str
    row: Lever

    def accepts(self, question: Question) -> bool:
        return bool(question.options.get(self.row.option))

    def apply(self, question: Question) -> tuple[Question, tuple[AppliedLever, str]]:
        """On the graph that the schedule will give again, without the option."""
        graph, options = question.graph, dict(question.options)
        changed, told = attribute_at(self.row.change)(graph, options.pop(self.row.option))
        lever = AppliedLever.between(self.name, graph, changed, told, self.row.tolerance)
        return replace(question, graph=lever.on(graph), options=options), (lever, graph.hash)

    def invert(self, schedule: Schedule, inverse: tuple[AppliedLever, str]) -> Schedule:
        """One that changed nothing is not named."""
        lever, captured_hash = inverse
        if schedule.graph_hash == captured_hash:
            return schedule
        levers = (lever, *schedule.levers)
        return msgspec.structs.replace(schedule, levers=levers, captured_hash=captured_hash)


def _solve_alone(question: Question) -> Result:
    """The answer of the solver, without any lever: the end of every chain."""
    options = dict(question.options)
    # A solver refuses unknown options.
    if question.known_us < inf and "known_us" in option_names(question.solver):
        options["known_us"] = question.known_us
    made = make_solver(
        question.solver, time_limit_s=question.time_limit_s, progress=question.progress, **options
    )
    return made.solve(question.graph, question.budget_bytes)


def within_its_limit(rest: Rest) -> Rest:
    """`rest`, which names the limit that it was given where that ends it without a schedule."""
    return lambda asked: with_time_limit_message(rest(asked), asked.time_limit_s)


ASKED: dict[str, Callable[[Question], bool]] = {  # whether a question asks for a lever
    "copies": lambda question: can_copy(question.graph) and plans_copies(question.solver),
    "recompute": lambda question: bool(question.recompute),
    "free order": lambda question: question.options.get("order") == "free",
}


LEVER_PAIRS = {
    ("copies", "recompute"): (
        "leave out {recompute} or {host}: pins to recompute are not planned with copies"
    ),
    ("copies", "free order"): (
        "take order fixed, or leave out {host}: order free is not planned with copies to the host"
    ),
}
"""Why they do not go together, and what to do instead; options in braces as the user has them."""


def refuse_pairs(question: Question) -> None:
    """SolverError says why they do not go together."""
    for one, other in LEVER_PAIRS:
        if ASKED[one](question) and ASKED[other](question):
            raise SolverError(_text_of(one, other))


def _text_of(one: str, other: str) -> str:
    named = {name: option(name) for name in ("recompute", "host")}
    return LEVER_PAIRS[one, other].format_map(named)


# A solve: levers in the order of `REDUCTIONS`. Regions come first: each choice is another graph.
# Updates ask for several budgets. Proofs without copies are weakened behind the rules that may
# replace the schedule. Pins are next to the solver, since rules keep none.


def solve_question(question: Question) -> Result:
    """Ask the chain of levers; SolverError for two things that no plan keeps together."""
    refuse_pairs(question)
    with one_job():  # Ctrl-C in one solve leaves no time to the next
        levers = tuple(_reduction(name, row) for name, row in REDUCTIONS.items())
        return with_time_limit_message(fold(question, levers), question.time_limit_s)


def fold(question: Question, levers: tuple[Reduction[Any], ...]) -> Result:
    """The answer of the first lever that accepts, with those behind it as its rest."""
    for i, lever in enumerate(levers):
        if lever.accepts(question):
            rest = functools.partial(fold, levers=levers[i + 1 :])
            return _held(type(lever).__name__, question, rest, lever.solve)
    return _held(question.solver, question, _solve_alone, lambda asked, rest: rest(asked))


def _held(
    name: str, question: Question, rest: Rest, solve: Callable[[Question, Rest], Result]
) -> Result:
    """What `solve` answers, held to the rules where that is on."""
    if os.environ.get(VARIABLE) != "1":
        return solve(question, rest)

    def asked(changed: Question) -> Result:
        for rule in _broken_by_change(question.graph, changed.graph):
            raise GraphError(f"lever {name} broke a rule of a legal step: {rule}")
        return rest(changed)

    answer = solve(question, asked)
    for rule in _broken_by_answer(question.graph, question.budget_bytes, answer):
        raise SolverError(f"the answer of {name} breaks a rule: {rule}")
    return answer


# What holds between levers: of pairs of graphs, and of answers. tinygrad runs such rules between
# passes too (https://github.com/tinygrad/tinygrad, spec.py).


def _broken_by_change(before: TrainingGraph, after: TrainingGraph) -> Iterator[str]:
    """Rules that a lever breaks which asks the rest of `after` in place of `before`."""
    if before.inputs != after.inputs or before.device != after.device:
        yield "the batch and the device stay the same"
    # A lever may take outputs away, as updates do, never invent one.
    if not set(after.outputs) <= set(before.outputs):
        yield "results of the step are as asked"
    if not set(after.forward_outputs) <= set(before.forward_outputs):
        yield "results of forward are as asked"
    both = set(before.ordered_ops) & set(after.ordered_ops)
    of_both = [[op for op in one.ordered_ops if op in both] for one in (before, after)]
    if of_both[0] != of_both[1]:
        yield "draws and side effects keep their order"
    held = {*before.forward_outputs, *before.outputs}  # chunks make others of the same names
    for value in after.values:
        if value.producer and value.name not in held:
            continue
        known = before.value_by_name.get(value.name)
        if known is not None and (known.size_bytes, known.shape) != (value.size_bytes, value.shape):
            yield f"no value of the caller changes its size, as {value.name} does"
            return


def _broken_by_answer(graph: TrainingGraph, budget_bytes: int, answer: Result) -> Iterator[str]:
    if answer.schedule is None:
        if answer.status not in ("infeasible", "none found", "time limit"):
            yield "an answer without a schedule is infeasible, none found or cut short"
        return
    if answer.peak_bytes > budget_bytes:
        yield "the peak is within the budget"
    if answer.lower_bound_us > answer.time_us * (1 + _SAME):
        yield "no bound is above the time"
    if answer.status == "optimal" and (answer.gap or 0.0) > _SAME:
        yield "an optimal answer meets its bound"
    found = simulate(graph, answer.schedule)  # which refuses a schedule that breaks a rule
    is_same_time = abs(found.time_us - answer.time_us) <= _SAME * max(found.time_us, 1.0)
    if found.peak_bytes != answer.peak_bytes or not is_same_time:
        yield "figures are the simulator's"


@functools.cache
def _reduction(name: str, row: Lever) -> Reduction[Any]:
    return _OtherOps(name, row) if row.change else attribute_at(row.reduction)()
