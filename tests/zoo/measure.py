"""One model of the zoo, captured, planned, rewritten and run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

import remat
from remat.budgets import unmodified
from remat.graph_capture import TrainingGraph, trace
from remat.graph_capture.costs.op_costs import measure_costs
from remat.rewriter.checking.check import Check, check
from remat.rewriter.rewriting import rewrite
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver import make_solver
from tests.zoo.case import Case, Entry
from tests.zoo.training import differences

SHARE = "60%"
SEARCH_S = 5.0
"""A search for a schedule: its best counts, as what is shown is that it is exact."""


@dataclass(frozen=True)
class Plan:
    """One schedule: what was predicted, and what its module did."""

    predicted_bytes: int
    check: Check

    @property
    def error(self) -> float:
        """Predicted peak over the measured one, minus one."""
        return self.predicted_bytes / self.check.plan_peak_bytes - 1


@dataclass(frozen=True)
class Row:
    """All that is known of a model.

    Attributes
    ----------
    ops : of its graph. trace_s, timing_s : seconds that capture and timing took.
    everything : the plan that keeps all. planned : the one for 60 % of the unmodified
        peak, or for the least budget known where that is more. share : of that peak.
    unmodified_bytes : predicted peak of the unmodified step. trained : in what the planned model
        and an eager twin differ after steps of training; nothing, if all is well.
    """

    ops: int
    trace_s: float
    timing_s: float
    everything: Plan
    planned: Plan
    share: float
    unmodified_bytes: int
    trained: list[str]


def measured(entry: Entry) -> Row:
    """Capture a model, run it as it keeps everything and as planned, and train it as planned."""
    case = entry.make()
    batch = {"loss_fn": case.loss_fn, "target": case.target}
    with case.under_autocast():
        began_s = time.perf_counter()
        traced = trace(case.model, case.args, case.kwargs, **batch)
        traced_s = time.perf_counter()
        graph = measure_costs(traced)
        costed_s = time.perf_counter()
        everything, _ = _plan(case, graph, make_solver("store_all").schedule(graph))
        planned, module = _plan(case, graph, _smaller(graph))
    unmodified_bytes = unmodified(graph).peak_bytes
    return Row(
        len(graph.ops), traced_s - began_s, costed_s - traced_s, everything, planned,
        planned.predicted_bytes / unmodified_bytes, unmodified_bytes,
        differences(entry, case, module),
    )  # fmt: skip


@dataclass(frozen=True)
class PartsRow:
    """A model that is no one graph, at the least peak of its parts; `share` of what forward saves
    is saved by modules that may run again."""

    planned: Plan
    share: float
    trained: list[str]


def measured_in_parts(entry: Entry) -> PartsRow:
    """Plan it with one line, and train it."""
    case = entry.make()
    batch = {"loss_fn": case.loss_fn, "target": case.target}
    with case.under_autocast():
        module: Any = remat.rematerialize(
            case.model, case.args, case.kwargs, **batch, budget="min", verbose=False
        )
        found = check(case.model, module, case.args, case.kwargs, **batch, steps=1)
    planned = Plan(module._remat_prediction.peak_bytes, found)
    return PartsRow(planned, module.planned_share, differences(entry, case, module))


def _smaller(graph: TrainingGraph) -> Schedule:
    result = remat.solve(graph, SHARE, "cut", time_limit_s=SEARCH_S)
    if result.schedule is None:
        result = remat.solve(graph, "min", "cut", time_limit_s=SEARCH_S)
    assert result.schedule is not None, result.message
    return result.schedule


def _plan(case: Case, graph: TrainingGraph, schedule: Schedule) -> tuple[Plan, nn.Module]:
    batch = {"loss_fn": case.loss_fn, "target": case.target}
    module = rewrite(case.model, schedule)
    found = check(case.model, module, case.args, case.kwargs, **batch, steps=1)
    return Plan(simulate(graph, schedule).peak_bytes, found), module
