"""What a report says: plain facts about a plan, from `simulate` or from a measurement."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from remat.graph_capture.graph import Floats, Ints, TrainingGraph
from remat.schedules.layout import Layout
from remat.schedules.schedule import Schedule


class Alternative(msgspec.Struct, frozen=True):
    """Another schedule of the same step, as `simulate` judges it.

    Attributes
    ----------
    name : the rule or the solver that made it.
    budget_bytes : the budget that it was asked to keep; 0 for a rule that takes none.
    lower_bound_us : no schedule at that budget takes less; 0 if nothing is known.
    """

    name: str
    peak_bytes: int
    time_us: float
    overhead: float
    budget_bytes: int = 0
    lower_bound_us: float = 0.0


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """A real step of the rewritten module.

    Attributes
    ----------
    moments : from 0 to the end of the step, in any unit, [n].
    live_bytes : live at each moment, resident ones included, [n].
    peak_bytes, time_us : of the step; `time_us` is None if the step was not timed.
    """

    moments: Floats
    live_bytes: Ints
    peak_bytes: int
    time_us: float | None = None


@dataclass(frozen=True, eq=False)
class PageFacts:
    """A plan, and what it is compared with.

    Attributes
    ----------
    graph, schedule : the step and its plan.
    unmodified_graph, unmodified_schedule : the step as eager runs it.
    budget_bytes : 0 if there was none. lower_bound_us : proven; 0 if nothing is known.
    status, solver : how it was solved.
    rules : schedules of simple rules. fronts : by solver, the best at several budgets.
    measured : if the step was run. cost_origin : where costs come from, in words.
    note : what to say of the plan beyond its figures, such as that its bound is not proved here.
    stated_by : the file that states the bounds of `fronts`; empty where they were proved just now.
    layout : where its buffers lie in one arena, to be drawn.
    """

    graph: TrainingGraph
    schedule: Schedule
    unmodified_graph: TrainingGraph
    unmodified_schedule: Schedule
    budget_bytes: int
    lower_bound_us: float
    status: str
    solver: str
    rules: tuple[Alternative, ...] = ()
    fronts: tuple[tuple[str, tuple[Alternative, ...]], ...] = ()
    measured: MeasuredStep | None = None
    cost_origin: str = ""
    note: str = ""
    stated_by: str = ""
    layout: Layout | None = None

    @property
    def bound_name(self) -> str:
        """What bounds of fronts are called: a file that anyone can edit proves nothing."""
        return f"bound stated by {self.stated_by}, not proved" if self.stated_by else "bound"
