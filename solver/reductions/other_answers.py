"""Levers that leave the question and change the answer: simple rules, and bounds beside copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from remat.graph_capture.errors import option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.problem import can_copy
from remat.solver.reductions.reduction import Question, Reduction, Rest
from remat.solver.result import (
    KNOWN,
    NONE_FITS,
    OUT_OF_TIME,
    least_budget_message,
    with_weaker_proofs,
    without_least_budget,
)
from remat.solver.search import is_interrupted
from remat.solver.table import TAKE_CHUNKS, make_solver, plans_copies

# Rules answer in the time to read the graph, and bound the least budget that a search names.

# Written by hand, and the oldest one; each near-linear.
SIMPLE_RULES = ("selective", "keep_attention_output", "chen_sqrt", "full")
# Policies of low least peaks, for graphs of no more ops; each has such a part of the time at least.
_POLICIES, _MOST_OPS, _PART = ("msps", "largest"), 1000, 1 / 10


class SimpleRules(Reduction[None]):
    """Puts a rule's schedule where `auto` found none."""

    def accepts(self, question: Question) -> bool:
        # The rules keep no pins. Beside a known schedule, a search may end without another.
        if question.keep or question.recompute or question.known_us < inf:
            return False
        # Other solvers are named for their schedules; 0 bytes ask for the least peak.
        names_least = question.solver in TAKE_CHUNKS and not question.budget_bytes
        return question.solver == "auto" or names_least

    def solve(self, question: Question, rest: Rest) -> Result:
        lost = rest(question)
        return simple_rule_fallback(
            question.graph, question.budget_bytes, lost, question.time_limit_s
        )


def simple_rule_fallback(
    graph: TrainingGraph, budget_bytes: int, lost: Result, time_limit_s: float
) -> Result:
    """The fastest rule that fits, with the bound of `lost`; else `lost` with the least budget."""
    is_least = 0 < lost.least_feasible_bytes <= lost.least_bound_bytes  # no rule is lower
    if lost.schedule is not None or is_least or is_interrupted():
        return lost
    made = [make_solver(name).solve(graph, budget_bytes) for name in SIMPLE_RULES]
    # At 0 bytes a policy would search until its time is over.
    if budget_bytes and len(graph.ops) <= _MOST_OPS and all(one.schedule is None for one in made):
        part_s = max(time_limit_s - lost.wall_s, _PART * time_limit_s)
        policies = (make_solver(name, time_limit_s=part_s) for name in _POLICIES)
        made += [policy.solve(graph, budget_bytes) for policy in policies]
    if not (fitting := [one for one in made if one.schedule is not None]):
        return _naming_the_lowest(lost, made)
    best = min(fitting, key=lambda one: (one.time_us, one.peak_bytes))
    # More time might have found a faster one.
    status = "time limit" if lost.status == "time limit" else best.status
    return msgspec.structs.replace(
        best, status=status, solver=lost.solver, floor=lost.floor,
        lower_bound_us=min(max(lost.lower_bound_us, graph.time_us), best.time_us),
        wall_s=lost.wall_s + sum(one.wall_s for one in made),
        message=_rule_text(lost, best.solver, time_limit_s),
    )  # fmt: skip


def _rule_text(lost: Result, rule: str, time_limit_s: float) -> str:
    if lost.status != "time limit":
        return f"the search found no schedule that fits; this one follows a simple rule, {rule}"
    return (
        f"{OUT_OF_TIME} {time_limit_s:.3g} s ended the search before it had a schedule; this one "
        f"follows a simple rule, {rule}. A longer limit may find a faster one "
        f"({option('time_limit_s')})"
    )


def _naming_the_lowest(lost: Result, made: Sequence[Result]) -> Result:
    known = [one for one in made if one.least_schedule is not None]
    lowest = min(known, key=lambda one: one.least_feasible_bytes, default=None)
    known_bytes = lost.least_feasible_bytes
    if lowest is None or 0 < known_bytes <= lowest.least_feasible_bytes:
        return lost
    least_bytes, is_proved = lowest.least_feasible_bytes, lost.message.startswith(NONE_FITS)
    if (named := f"{known_bytes} {KNOWN}") in lost.message:
        message = lost.message.replace(named, f"{least_bytes} {KNOWN}")
    else:
        rest = without_least_budget(lost.message)
        message = least_budget_message(lost.budget_bytes, least_bytes, rest, is_proved=is_proved)
    return msgspec.structs.replace(
        lost, least_feasible_bytes=least_bytes, least_schedule=lowest.least_schedule,
        held_at_peak=lowest.held_at_peak, message=message,
    )  # fmt: skip


class WithoutCopies(Reduction[None]):
    """Weakens what a solver proves that does not know of copies."""

    def accepts(self, question: Question) -> bool:
        return can_copy(question.graph) and not plans_copies(question.solver)

    def solve(self, question: Question, rest: Rest) -> Result:
        return with_weaker_proofs(rest(question), question.graph.time_us, "copies")
