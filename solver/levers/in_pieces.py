"""Whether a region runs in pieces, and in how many: a decision around any solver.

A graph says of each region which numbers of pieces it may run in, and at what price
(`TrainingGraph.regions`). Each choice is another graph, whose schedules the judge knows. So solvers
need not know of it. TSPLIT (X. Nie et al., ICDE 2022) takes the same decision greedily.

One region is taken or none, and none where the best whole schedule takes no longer than each op
once, in the pieces that take the least, or longer by `gap` at most. Heads come first. MLPs in
pieces, with the heads or without as these turned out, are solved for if the best until then takes
longer than each of their ops once. Else they cannot be better, whatever the memory. That is so at
all but the lowest budgets, since pieces of MLPs make much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from remat.graph_capture.graph import Region, TrainingGraph
from remat.schedules.as_planned import whole
from remat.solver.clock import Clock
from remat.solver.levers.one_region import (
    PART,
    Known,
    SolveOne,
    bound_us_of,
    least_us,
    most_held_bytes,
    most_of,
    named,
    solve_region,
)
from remat.solver.result import Result

__all__ = ["named", "solve_in_pieces"]

SAME_TIME = 1 + 1e-9
FIRST_PART = 2 / 3
"""Of the time limit, for what is solved before MLPs in pieces, where whole ones hardly fit."""
NEAR, TIGHT = 2, 1
"""MLPs in pieces are tried where the budget leaves so many times what they hold, beside what is
there anyway; whole ones hardly fit where it leaves so many."""


def solve_in_pieces(
    graph: TrainingGraph, budget_bytes: int, solve_one: SolveOne, time_limit_s: float, gap: float,
    at_hand: Result | None = None,
) -> Result:  # fmt: skip
    """The fastest schedule of `graph`, whole or with a region in pieces, and a bound for all.

    Another choice is not tried where it cannot be faster by more than `gap`. `at_hand` is the
    outcome for whole ops, where it is known.
    """
    clock = Clock(time_limit_s)
    regions = [region for region in graph.regions if region.choices]
    later = [region for region in regions if "mlp" in region.kinds]
    room = min((_room(graph, region, budget_bytes) for region in later), default=inf)
    may_be_needed = room <= NEAR
    heads = _with_regions(graph, [region for region in regions if region not in later])
    with clock.limited_to((FIRST_PART if room <= TIGHT else 1) * time_limit_s):
        known = _solve_heads(heads, budget_bytes, solve_one, clock, gap, at_hand)
    has_heads = _has_pieces(known.best)
    # Those that have the heads as these turned out, and then the others, for their bound.
    for region in sorted(later, key=lambda one: ("head" in one.kinds) is not has_heads):
        one = _with_regions(graph, [region])
        if _is_near(known.best, one, 0.0):
            continue
        if may_be_needed and clock.left_s > 0 and not _is_near(known.best, one, gap):
            known = solve_region(one, budget_bytes, solve_one, clock, known, gap)
            may_be_needed = False
        else:
            known = Known(known.best, min(known.bound_us, least_us(one)))
    return known.best if known.is_whole else _concluded(graph, known, clock)


def _solve_heads(
    graph: TrainingGraph, budget_bytes: int, solve_one: SolveOne, clock: Clock, gap: float,
    at_hand: Result | None,
) -> Known:  # fmt: skip
    """The best with heads whole or in pieces."""
    if not graph.regions:
        found = at_hand or solve_one(whole(graph), clock.left_s, inf)
        return Known(found, bound_us_of(found, graph), is_whole=True)
    if most_held_bytes(graph) > budget_bytes:
        return solve_region(graph, budget_bytes, solve_one, clock, None, gap)
    captured = at_hand or solve_one(whole(graph), PART * clock.left_s, inf)
    known = Known(captured, bound_us_of(captured, graph), is_whole=True)
    # Pieces may be faster than the whole, as those with fewer products are.
    if _is_near(captured, graph, 0.0):
        return known
    if _is_near(captured, graph, gap):
        return Known(captured, min(known.bound_us, least_us(graph)))
    return solve_region(graph, budget_bytes, solve_one, clock, known, gap)


def _is_near(found: Result, graph: TrainingGraph, gap: float) -> bool:
    """Whether no choice of the regions of `graph` is faster than `found` by more than `gap`."""
    return found.schedule is not None and found.time_us <= least_us(graph) * (SAME_TIME + gap)


def _with_regions(graph: TrainingGraph, regions: Sequence[Region]) -> TrainingGraph:
    """`graph` with some of its regions; its hash is the same."""
    return msgspec.structs.replace(graph, regions=tuple(regions))


def _has_pieces(result: Result) -> bool:
    schedule = result.schedule or result.least_schedule
    return schedule is not None and bool(schedule.pieces)


def _room(graph: TrainingGraph, region: Region, budget_bytes: int) -> float:
    """How many times what a region holds the budget leaves, beside what is resident, or is there as
    the step ends."""
    own, size = set(region.ops), graph.value_by_name
    held_bytes = most_of(graph, [op for op in graph.ops if op.name in own])
    made = (size[name] for name in graph.outputs)
    outputs_bytes = sum(value.size_bytes for value in made if value.producer)
    return (budget_bytes - graph.resident.total_bytes - outputs_bytes) / max(held_bytes, 1)


def _concluded(graph: TrainingGraph, known: Known, clock: Clock) -> Result:
    """The best with the bound for all choices."""
    best = known.best
    bound_us = known.bound_us if known.bound_us < inf else graph.time_us
    is_proved = best.schedule is not None and best.time_us <= bound_us * SAME_TIME
    status = best.status
    if best.schedule is not None:
        is_late = clock.left_s <= 0
        status = "optimal" if is_proved else ("time limit" if is_late else "feasible")
    return msgspec.structs.replace(
        best,
        status=status,
        lower_bound_us=min(bound_us, best.time_us) if is_proved else bound_us,
        least_bound_bytes=0,
        wall_s=clock.elapsed_s,
    )
