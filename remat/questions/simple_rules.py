"""Whether a rule that people write by hand would do as well as a plan."""

from __future__ import annotations

import msgspec

import remat.solver as solvers
from remat.graph_capture.derived.eager import as_eager
from remat.graph_capture.graph import TrainingGraph
from remat.questions.layer_checkpoints import CLOSE, EveryNth, candidates
from remat.solver.result import Result

RULES = {
    "full": "checkpoint every layer",
    "selective": "recompute the core of each attention",
    "keep_attention_output": "checkpoint every layer, keeping attention's output",
    "norms_and_activations": "recompute normalisations and activations",
}
"""Solvers of the table that carry out a rule, and what the rule says."""


class Rule(msgspec.Struct, frozen=True):
    """One rule on this graph; figures from `simulate`.

    Attributes
    ----------
    name : of the solver. says : what to do. peak_bytes : of its schedule, or the lowest known
        where none fits; 0 where that is not known. slower : than the plan, as a fraction of the
        plan's time; below 0 where it is faster.
    """

    name: str
    says: str
    fits: bool
    peak_bytes: int
    overhead: float
    slower: float

    @property
    def is_close(self) -> bool:
        """Whether it fits and is within 1 % of the plan's time."""
        return self.fits and self.slower <= CLOSE


def simple_rules(graph: TrainingGraph, result: Result) -> tuple[Rule, ...]:
    """Each rule at the budget of a result that has a schedule: those that fit first, by time.

    Peaks are those of a step that frees what it no longer reads, with masks as eager has them.
    """
    rules = [_by_solver(graph, result, name) for name in RULES]
    layers = _every_nth(graph, result)
    if layers is not None:
        rules.append(layers)
    return tuple(sorted(rules, key=lambda rule: (not rule.fits, rule.slower, rule.peak_bytes)))


def _by_solver(graph: TrainingGraph, result: Result, name: str) -> Rule:
    found = solvers.solve(as_eager(graph), result.budget_bytes, name)
    slower = found.time_us / result.time_us - 1 if found.schedule and result.time_us else 0.0
    return Rule(
        name, RULES[name], found.schedule is not None, found.peak_bytes, found.overhead, slower
    )


def _every_nth(graph: TrainingGraph, result: Result) -> Rule | None:
    """The fastest n that fits, else the one of the lowest peak; None where no layer repeats."""
    found = list(candidates(graph, result.time_us))
    if not found:
        return None
    fitting = [one for one in found if one.peak_bytes <= result.budget_bytes]
    best = min(fitting, key=lambda one: (one.time_us, one.peak_bytes), default=None)
    shown = best or min(found, key=lambda one: one.peak_bytes)
    return Rule(
        "every_n_layers", _text(shown), best is not None, shown.peak_bytes, shown.overhead,
        shown.slower,
    )  # fmt: skip


def _text(one: EveryNth) -> str:
    return f"checkpoint {one.which} of {one.where}"
