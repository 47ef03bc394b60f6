"""Solves of one graph in several orders of first computations, and the Result they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.bounds.floor import LEAST_BOUND, floor_above, floor_text
from remat.solver.ordering import Order, for_graph
from remat.solver.problem import Problem
from remat.solver.result import INTERRUPTED, KNOWN, Result, judged
from remat.solver.search import Listener


class Share(NamedTuple):
    """What a fixed-order solve may take, whom it tells, and a schedule to begin from.

    `is_look` : it may end after its first schedules. Its status is "time limit" if there was
    more to do.
    """

    time_limit_s: float
    progress: Listener | None = None
    start: Schedule | None = None
    is_look: bool = False


class SolveFixed(Protocol):
    """A solver that keeps the order of the graph it is given."""

    def __call__(self, graph: TrainingGraph, budget_bytes: int, share: Share, /) -> Result:
        """The best schedule in that order, with a bound for it."""
        ...


class Attempt(NamedTuple):
    """One order solved; `name` is for people.

    `is_repeatable` : a solve for any other budget tries that order too.
    """

    name: str
    order: Order
    is_repeatable: bool
    result: Result

    @property
    def rank(self) -> tuple[float, int]:
        """Less is better: time, then peak; without a schedule the least budget known to do."""
        result = self.result
        if result.schedule is None:
            return float("inf"), result.least_feasible_bytes or 1 << 62
        return result.time_us, result.peak_bytes


@dataclass(slots=True)
class Attempts:
    """All solves of `graph`, the first one in its own order, and what is proved for any order.

    Attributes
    ----------
    bound_us : no schedule takes less. least_bound_bytes : none has a lower peak.
    is_infeasible : none fits, proved. cut_short : time ended the search.
    """

    graph: TrainingGraph
    budget_bytes: int
    made: list[Attempt] = field(default_factory=list[Attempt])
    bound_us: float = 0.0
    least_bound_bytes: int = 0
    is_infeasible: bool = False
    cut_short: bool = False
    is_interrupted: bool = False

    @property
    def best(self) -> Attempt:
        """The best attempt yet, even if none has a schedule."""
        return min(self.made, key=lambda attempt: attempt.rank)

    @property
    def latest(self) -> dict[Order, Result]:
        """The last Result of each order, the given one first."""
        return {attempt.order: attempt.result for attempt in self.made}

    @property
    def has_schedule(self) -> bool:
        """Whether some order has a schedule that fits."""
        return bool(self.made) and self.best.result.schedule is not None

    def is_proved(self, gap: float) -> bool:
        """Whether the best is proved to be within `gap` of every order's best."""
        return self.has_schedule and self.best.result.time_us <= self.bound_us * (1 + gap)

    def result(self, wall_s: float) -> Result:
        """The outcome in terms of the graph in its own order."""
        said = [f"{INTERRUPTED}: this is the best found until then"] if self.is_interrupted else []
        schedule = self.best.result.schedule
        if schedule is None:
            return self._without_schedule(said, wall_s)
        best = self.best
        floor = floor_above(Problem.of(self.graph), self.budget_bytes)
        if best.order != self.made[0].order:
            said.append("First computations are in another order than captured")
        if floor is not None:
            said.append(floor_text(self.graph, floor, schedule))
        found = judged(
            self.graph,
            for_graph(self.graph, schedule),
            budget_bytes=self.budget_bytes,
            lower_bound_us=min(self.bound_us, best.result.time_us),
            wall_s=wall_s,
            cut_short=self.cut_short,
            message=". ".join(said),
        )
        return msgspec.structs.replace(found, floor=floor)

    def _without_schedule(self, said: Sequence[str], wall_s: float) -> Result:
        given, found = self.latest[self.made[0].order], _repeatable(self.made).result
        is_cut_short = self.cut_short and not self.is_infeasible
        least = found.least_schedule
        return msgspec.structs.replace(
            found,
            least_schedule=least and for_graph(self.graph, least),
            status="time limit" if is_cut_short else "infeasible",
            lower_bound_us=self.bound_us,
            least_bound_bytes=self.least_bound_bytes,
            floor=given.floor,
            wall_s=wall_s,
            message=". ".join([*said, *self._refusal(found.least_feasible_bytes)]),
        )

    def _refusal(self, least_bytes: int) -> list[str]:
        """What was tried, what is proved, and what is known of the given order."""
        if self.is_infeasible:
            text = f"no schedule fits {self.budget_bytes} bytes in any order of first computations"
        else:
            count = len(self.latest) - 1
            others = {0: "no better one was found", 1: "1 other was tried"}
            text = (
                f"no schedule found that fits {self.budget_bytes} bytes in the given order of "
                f"first computations; {others.get(count, f'{count} others were tried')}"
            )
        if least_bytes:
            text = f"{text}; {least_bytes} {KNOWN}"
        bound = f"{LEAST_BOUND} {self.least_bound_bytes} bytes in any order"
        said = self.latest[self.made[0].order].message
        return [
            text,
            *([bound] if self.least_bound_bytes else []),
            *([f"In the given order: {said}"] if said else []),
        ]


def _repeatable(made: Sequence[Attempt]) -> Attempt:
    """The attempt of the least budget known, among those that any other solve tries too.

    A budget that is named must be found again when it is asked for.
    """
    return min((a for a in made if a.is_repeatable), key=lambda attempt: attempt.rank)
