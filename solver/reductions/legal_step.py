"""What holds between levers: a spec of legal steps and answers, checked where `REMAT_CHECK` is 1.

Each rule is a row: what it says, and a function that looks. A graph by itself is checked whenever
one is made (`TrainingGraph`), so these are about pairs: a question and what a lever made of it, and
a question and its answer. tinygrad keeps its rules so, in one table that is run between passes
(https://github.com/tinygrad/tinygrad, spec.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from remat.graph_capture.errors import GraphError, SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import gap_of, simulate
from remat.solver.result import Result

VARIABLE = "REMAT_CHECK"
_SAME = 1e-9
"""Largest relative difference of two times that come from the same sum."""


class _ChangeRule(NamedTuple):
    """`holds` of the graph that was asked and the one that a lever asks the rest."""

    says: str
    holds: Callable[[TrainingGraph, TrainingGraph], bool]


class _AnswerRule(NamedTuple):
    """`holds` of the graph and the budget that were asked, and the answer."""

    says: str
    holds: Callable[[TrainingGraph, int, Result], bool]


def _keeps_order(before: TrainingGraph, after: TrainingGraph) -> bool:
    """Whether ops that draw or have effects, and that both graphs have, come in the same order."""
    both = set(before.ordered_ops) & set(after.ordered_ops)
    of_both = [[name for name in one.ordered_ops if name in both] for one in (before, after)]
    return of_both[0] == of_both[1]


_CHANGES: tuple[_ChangeRule, ...] = (
    _ChangeRule("the batch stays the same", lambda a, b: a.inputs == b.inputs),
    _ChangeRule("the device stays the same", lambda a, b: a.device == b.device),
    _ChangeRule(
        "what the step gives stays the same",
        lambda a, b: set(a.outputs) >= set(b.outputs) and set(a.forward_outputs) >= set(
            b.forward_outputs
        ),
    ),
    _ChangeRule("draws and effects keep their order", _keeps_order),
    _ChangeRule(
        "no value that both have changes its size or type",
        lambda a, b: all(
            (value.size_bytes, value.dtype, value.shape)
            == (other.size_bytes, other.dtype, other.shape)
            for value in a.values
            if (other := b.value_by_name.get(value.name)) is not None
        ),
    ),
)  # fmt: skip

_ANSWERS: tuple[_AnswerRule, ...] = (
    _AnswerRule(
        "an answer without a schedule is infeasible or was cut short",
        lambda graph, budget_bytes, r: (
            r.schedule is not None or r.status in ("infeasible", "time limit")
        ),
    ),
    _AnswerRule(
        "its peak is within the budget",
        lambda graph, budget_bytes, r: r.peak_bytes <= budget_bytes,
    ),
    _AnswerRule(
        "no bound is above its time",
        lambda graph, budget_bytes, r: (
            r.schedule is None or r.lower_bound_us <= r.time_us * (1 + _SAME)
        ),
    ),
    _AnswerRule(
        "what is called optimal meets its bound",
        lambda graph, budget_bytes, r: (
            r.status != "optimal" or (gap_of(r.time_us, r.lower_bound_us) or 0.0) <= _SAME
        ),
    ),
    _AnswerRule(
        "its figures are those of the simulator",
        lambda graph, budget_bytes, r: _is_judged(graph, r),
    ),
)


def _is_judged(graph: TrainingGraph, result: Result) -> bool:
    if result.schedule is None:
        return True
    found = simulate(graph, result.schedule)  # which refuses a schedule that breaks a rule
    same_time = abs(found.time_us - result.time_us) <= _SAME * max(found.time_us, 1.0)
    return found.peak_bytes == result.peak_bytes and same_time


def are_held() -> bool:
    """Whether steps are held to the rules here."""
    return os.environ.get(VARIABLE) == "1"


def require_legal_change(before: TrainingGraph, after: TrainingGraph, lever: str) -> None:
    """Raise `GraphError` for the first rule that what a lever asks the rest breaks."""
    for rule in _CHANGES:
        if not rule.holds(before, after):
            raise GraphError(f"lever {lever} broke a rule of a legal step: {rule.says}")


def require_legal_answer(
    graph: TrainingGraph, budget_bytes: int, answer: Result, lever: str
) -> None:
    """Raise `SolverError` for the first rule that the answer to a question breaks."""
    for rule in _ANSWERS:
        if not rule.holds(graph, budget_bytes, answer):
            raise SolverError(f"the answer of {lever} breaks a rule: {rule.says}")
