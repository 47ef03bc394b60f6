"""What a report says: plain facts about a plan, from `simulate` or from a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from remat.graph_capture.graph import Floats, Ints, TrainingGraph
from remat.schedules.layout import Layout
from remat.schedules.outcome import Check
from remat.schedules.schedule import Schedule
from remat.schedules.timeline import Timeline, timeline


class Alternative(msgspec.Struct, frozen=True):
    """Another schedule of a step; `budget_bytes`, `lower_bound_us` are 0 where there is none."""

    name: str
    peak_bytes: int
    time_us: float
    overhead: float
    budget_bytes: int = 0
    lower_bound_us: float = 0.0


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    moments: Floats  # from 0 to its end, in any unit, [n]
    live_bytes: Ints  # what is live then, [n]
    peak_bytes: int
    time_us: float | None = None  # None if it was not timed


@dataclass(frozen=True, eq=False)
class PageFacts:
    graph: TrainingGraph
    schedule: Schedule
    unmodified_graph: TrainingGraph
    unmodified_schedule: Schedule
    budget_bytes: int  # 0 if there was none
    lower_bound_us: float  # proven; 0 if nothing is known
    verdict: str  # the line that `remat run` ends with
    details: tuple[tuple[str, str], ...]  # what it rests on: names, and what is said of each
    rules: tuple[Alternative, ...] = ()  # schedules of simple rules
    fronts: tuple[tuple[str, tuple[Alternative, ...]], ...] = ()  # by solver, at several budgets
    measured: MeasuredStep | None = None
    check: Check | None = None  # of a step beside an unmodified one
    note: str = ""  # beyond its figures, such as that its bound is not proved here
    stated_by: str = ""  # the file with the bounds of `fronts`; empty if proved just now
    layout: Layout | None = None

    @cached_property
    def line(self) -> Timeline:
        return timeline(self.graph, self.schedule)

    @cached_property
    def unmodified_line(self) -> Timeline:
        return timeline(self.unmodified_graph, self.unmodified_schedule)

    @property
    def bound_name(self) -> str:
        # Anyone can edit a file, so the bound that it states is unproved.
        return f"bound stated by {self.stated_by}, not proved" if self.stated_by else "bound"
