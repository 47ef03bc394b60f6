"""How much faster the plan of `cut` is than greedy plans, and in which modules."""

from __future__ import annotations

import msgspec

import remat.solver as solvers
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.verdicts.index_ranges import Indices, boxes, split_indices, written
from remat.solver.result import Result

GREEDY = ("msps", "dtr", "largest", "chen_greedy")
"""Solvers that decide step by step and never look back: three that evict, and one by segments."""
PLACES = 3
"""Most modules that are named."""


class Tried(msgspec.Struct, frozen=True):
    """One solver at the budget; `fits` is False where it found nothing."""

    solver: str
    fits: bool
    overhead: float
    wall_s: float


class Elsewhere(msgspec.Struct, frozen=True):
    """A module, and how much more time the greedy plan spends on recomputing there than `cut`'s.

    `extra_us` is below 0 where it spends less.
    """

    module: str
    extra_us: float


class AgainstGreedy(msgspec.Struct, frozen=True):
    """`cut` and the best greedy plan at one budget.

    Attributes
    ----------
    cut : its outcome. tried : outcomes of greedy solvers, the best first. slower : time of the
        best greedy plan over that of `cut`, minus one; None where either found nothing.
    places : modules, equal layers folded, where the best greedy plan spends most in excess.
    """

    cut: Tried
    tried: tuple[Tried, ...]
    slower: float | None
    places: tuple[Elsewhere, ...]

    @property
    def best(self) -> Tried:
        """The best greedy outcome."""
        return self.tried[0]

    @property
    def dearer(self) -> tuple[Elsewhere, ...]:
        """The places where the greedy plan spends more."""
        return tuple(place for place in self.places if place.extra_us > 0)


def against_greedy(
    graph: TrainingGraph, budget_bytes: int, *, each_s: float = 10.0
) -> AgainstGreedy:
    """Solve with `cut`, and with each of `GREEDY`.

    `cut` has `each_s` seconds, the greedy solvers have as many together. One that has no time
    left is not tried; the first always is.
    """
    cut = solvers.solve(graph, budget_bytes, "cut", time_limit_s=each_s)
    found: list[Result] = []
    for name in GREEDY:
        left_s = each_s - sum(one.wall_s for one in found)
        if left_s > 0 or not found:
            found.append(solvers.solve(graph, budget_bytes, name, time_limit_s=left_s))
    found.sort(key=lambda one: (one.schedule is None, one.time_us))
    best = found[0]
    slower, places = None, tuple[Elsewhere, ...]()
    if cut.schedule is not None and best.schedule is not None:
        slower = best.time_us / cut.time_us - 1
        places = _places(graph, cut.schedule, best.schedule)
    return AgainstGreedy(_tried(cut), tuple(map(_tried, found)), slower, places)


def _tried(result: Result) -> Tried:
    return Tried(result.solver, result.schedule is not None, result.overhead, result.wall_s)


def _places(graph: TrainingGraph, cut: Schedule, greedy: Schedule) -> tuple[Elsewhere, ...]:
    """The modules where the greedy plan recomputes most in excess, the most first."""
    ours, theirs = _spent(graph, cut), _spent(graph, greedy)
    extra_us = {name: theirs[name] - ours[name] for name in ours}
    found = [Elsewhere(name, us) for name, us in extra_us.items() if us]
    return tuple(sorted(found, key=lambda one: -one.extra_us)[:PLACES])


def _spent(graph: TrainingGraph, schedule: Schedule) -> dict[str, float]:
    """Time of recomputations by module; modules whose paths differ in indices alone are one."""
    runs = schedule.computations()
    places: dict[str, set[Indices]] = {}
    spent_us: dict[str, float] = {}
    for op in graph.ops:
        pattern, indices = split_indices(op.module)
        places.setdefault(pattern, set()).add(indices)
        spent_us[pattern] = spent_us.get(pattern, 0.0) + (runs[op.name] - 1) * op.cost_us
    return {
        ", ".join(written(pattern, box) for box in boxes(places[pattern])): us
        for pattern, us in spent_us.items()
    }
