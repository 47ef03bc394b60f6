"""What a cache of plans knows before it plans a batch, so that few batches are priced and solved.

A batch that fits with every op run once runs so. Another one takes a schedule that was made for
other sizes, if its step has the same ops and the judge finds that it fits at the sizes at hand. A
trace tells both, with the bytes that its ops take and without their times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from torch import nn

from remat.budgets import Budget
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links
from remat.graph_capture.prices.workspaces import Sized
from remat.graph_capture.tracing.one_trace import Trace
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.compiled import compile_step
from remat.rewriter.graphs.in_pieces import trace_in_pieces
from remat.rewriter.user_module.module import RematModule, make_module
from remat.schedules.over_range import carried
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solved import Solved
from remat.solver.store_all import StoreAll

MOST_SCHEDULES = 16
"""That are tried on a batch of other sizes; the first ones go first."""


class Reusable(NamedTuple):
    """A schedule that may fit. `overhead` : that it was solved with, at its own sizes."""

    overhead: float
    schedule: Schedule
    links: Links | None = None


class AtHand(NamedTuple):
    """A schedule for a trace that no solver was asked for.

    `graph` has the bytes that ops take, and no times. `peak_bytes` is the judge's, on that graph.
    """

    schedule: Schedule
    graph: TrainingGraph
    peak_bytes: int
    links: Links | None


class KnownPlans:
    """The schedules that a cache has at hand.

    Attributes
    ----------
    most_bytes : the highest peak of its plans. The run has room for that.
    is_checked : whether a whole step of the model was compared with eager's.
    """

    def __init__(self) -> None:
        self.most_bytes, self.is_checked = 0, False
        self._solved: list[Reusable] = []

    def note(self, found: Solved) -> None:
        """Keep a solved schedule at hand for batches of other sizes."""
        schedule = found.result.schedule
        assert schedule is not None
        self.took(found.result.peak_bytes)
        self._solved.append(Reusable(found.result.overhead, schedule, found.graph.links))
        del self._solved[:-MOST_SCHEDULES]

    def forget(self) -> None:
        """Have the next batch planned and compared as the first one was."""
        self.is_checked = False
        self._solved.clear()

    def took(self, peak_bytes: int) -> None:
        """Note the peak of a plan."""
        self.most_bytes = max(self.most_bytes, peak_bytes)

    def at_hand(self, traced: Trace, budget: Budget, *, may_keep_all: bool) -> AtHand | None:
        """A schedule for a trace that fits, of those the one with least overhead; or None.

        Parameters
        ----------
        may_keep_all : whether a step that runs every op once is what was asked for.
        """
        plain = [Reusable(0.0, StoreAll().schedule(traced.graph))] if may_keep_all else []
        # Without what kernels take for themselves a peak is too low: most end here.
        limit_bytes = self._budget_bytes(traced.graph, budget)
        tried = [
            one
            for one in (*plain, *sorted(self._solved, key=lambda one: one.overhead))
            if one.schedule.pieces or _fitting(traced.graph, one, limit_bytes)
        ]
        if not tried:
            return None
        sized = Sized(traced)
        limit_bytes = self._budget_bytes(sized.graph, budget)
        found = (_fitting(_graph_for(sized, one.schedule), one, limit_bytes) for one in tried)
        return next((one for one in found if one), None)

    def _budget_bytes(self, graph: TrainingGraph, budget: Budget) -> int:
        """The budget for a step; one that is a part of its own peak is no less than plans take."""
        if not budget.is_of_the_step:
            return budget.bytes_for(graph)
        own_bytes = budget.bytes_for(graph) if budget.kind == "share" else 0
        return max(own_bytes, self.most_bytes)


def _graph_for(sized: Sized, schedule: Schedule) -> TrainingGraph:
    """The graph to judge a schedule on: with its region in pieces, where it has one."""
    if not schedule.pieces:
        return sized.graph
    one = schedule.pieces[0]
    return sized.with_region(one.region, one.pieces, is_exact=one.exact)


def _fitting(graph: TrainingGraph, one: Reusable, budget_bytes: int) -> AtHand | None:
    """A candidate for a graph, if its step has the same ops and its peak is within the budget."""
    try:
        schedule = carried(one.schedule, graph)
        peak_bytes = simulate(graph, schedule, one.links).peak_bytes
    except ScheduleError:  # of another structure
        return None
    if peak_bytes > budget_bytes:
        return None
    schedule = msgspec.structs.replace(schedule, budget_bytes=budget_bytes)
    return AtHand(schedule, graph, peak_bytes, one.links)


def adopted(
    model: nn.Module,
    traced: Trace,
    schedule: Schedule,
    links: Links | None,
    *,
    audit: bool,
    is_compared: bool,
    **known: Any,
) -> RematModule:
    """The module of a schedule that was not solved for here.

    Parameters
    ----------
    audit : as of `remat.rematerialize`. is_compared : whether what its first step gives is compared
        with the model's own forward. known : the prediction and the priced graph, as of `rewrite`.
    """
    if schedule.pieces:
        traced = trace_in_pieces(model, traced.recipe, schedule, traced)
    step = compile_step(traced, schedule, links=links)
    audits = "first" if is_compared and not audit else of_steps(audit)
    module = make_module(
        model, schedule, traced.recipe, step, traced.python_state, **known, audit=audits
    )
    own_audit = type(module)._remat_audit
    if is_compared and own_audit is not None:
        own_audit.compare_next()
    return module
