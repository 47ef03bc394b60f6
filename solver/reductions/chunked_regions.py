"""Whether a region runs in chunks, and in how many: a decision around any solver.

Each choice (`TrainingGraph.regions`) is another graph, so solvers need not know of it. TSPLIT (X.
Nie et al., ICDE 2022) decides greedily. One region is taken or none, and none where the best whole
schedule takes no longer than each op once in the cheapest chunks, within `gap`. Heads come first.
MLPs are solved for if the best until then takes longer than each of their ops once, which is so at
the lowest budgets alone, as chunks of MLPs make much again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, cast

import msgspec

from remat.graph_capture.graph import Choice, Op, Region, TrainingGraph
from remat.schedules.derived import fastest_us, in_chunks, unchunked, with_choices
from remat.schedules.outcome import Result
from remat.schedules.schedule import ChunkedRegion, Schedule
from remat.schedules.value_report.globs import names_module, why_not_again
from remat.solver.reductions.reduction import Question, Reduction, Rest, within_its_limit
from remat.solver.result import evaluate_schedule, with_weaker_proofs
from remat.solver.search import Clock
from remat.solver.stopping import DEFAULT_GAP, gap_for
from remat.solver.table import TAKE_CHUNKS, check_number, option_names

# Two solves bound all choices of a region: of the captured graph, and of a relaxed one in which
# each op in chunks has the least time and workspace of all choices. Its schedule is judged at each
# real choice. A choice is solved for if the bounds leave it more than the gap to gain, told the
# best time known. Where one op alone exceeds the budget, the relaxed graph comes first, and the
# captured one only if that has not led below what the op takes.

_SolveOne = Callable[[TrainingGraph, float, float], Result]
"""Solves a graph within so many seconds; ends where none beats so many microseconds."""

_WORTH = 1e-3  # of time, if the gap is not wider, or of the peak: what a solve must be able to gain
# Of the time left, before others; these are unlikely where the captured graph cannot fit.
_PART, _LEAST_PART = 1 / 2, 4 / 5


class _Known(NamedTuple):
    """The best outcome so far, and the bound for all that it is the best of."""

    best: Result
    bound_us: float
    is_whole: bool = False  # that of the captured graph alone


def _solve_region(
    graph: TrainingGraph, budget_bytes: int, solve_one: _SolveOne, clock: Clock,
    known: _Known | None, gap: float,
) -> _Known:  # fmt: skip
    """The best of what is known and of the one region in chunks, if it is faster by `gap`."""
    choices = list(_numbers_of_chunks(graph))
    relaxed_graph = with_choices(graph, {r.name: _relaxed(r) for r in graph.regions})
    part = _LEAST_PART if known is None else _PART
    known_us = _time_us_of(known.best) if known is not None else inf
    relaxed = solve_one(relaxed_graph, max(part * clock.left_s, 0.0), known_us)
    found = _judged(graph, choices, budget_bytes, relaxed)
    floor_bytes = _most_held_bytes(graph)
    # Chunks have not led below it: the captured graph after all.
    if known is None and not any(_rank(one) < (True, inf, floor_bytes) for one in found):
        captured = solve_one(unchunked(graph), max(_PART * clock.left_s, 0.0), inf)
        known = _Known(captured, _bound_us_of(captured, graph))
    found += [known.best] if known is not None else []
    search = _Choices(graph, budget_bytes, solve_one, clock, relaxed, relaxed_graph.time_us, gap)
    search.solve(choices, found)
    bound_us = max(_bound_us_of(relaxed, relaxed_graph), _least_us(graph))
    if known is not None:
        bound_us = min(known.bound_us, bound_us)
    first = known.best if known is not None else relaxed
    return _Known(msgspec.structs.replace(min(found, key=_rank), solver=first.solver), bound_us)


@dataclass(frozen=True)
class _Choices:
    graph: TrainingGraph
    budget_bytes: int
    solve_one: _SolveOne
    clock: Clock
    relaxed: Result  # for the relaxed graph
    relaxed_us: float  # of its ops once
    gap: float  # that a solve must be able to gain, as a part of time

    def solve(self, choices: list[tuple[ChunkedRegion, ...]], found: list[Result]) -> None:
        """Adds to `found` what comes of the choices that could be better than its best."""
        choices = sorted(choices, key=self._hope_us)
        if all(one.schedule is None for one in found):
            choices.reverse()  # where nothing fits, the slowest take the least memory
        for i, chosen in enumerate(choices):
            if self.clock.left_s <= 0 or not self._is_worth(chosen, min(found, key=_rank)):
                continue
            best_us = _time_us_of(min(found, key=_rank))
            limit_s = self.clock.left_s / (len(choices) - i)
            solved = self.solve_one(in_chunks(self.graph, chosen), limit_s, best_us)
            found += _judged(self.graph, [chosen], self.budget_bytes, solved)

    def _is_worth(self, chosen: tuple[ChunkedRegion, ...], best: Result) -> bool:
        if best.schedule is not None:
            return self._hope_us(chosen) < best.time_us / (1 + max(_WORTH, self.gap))
        least_bytes = self.relaxed.least_feasible_bytes if self.relaxed.schedule is None else 0
        return least_bytes < (1 - _WORTH) * best.least_feasible_bytes

    def _hope_us(self, chosen: tuple[ChunkedRegion, ...]) -> float:
        """A bound: each op runs once in these chunks."""
        real_us = in_chunks(self.graph, chosen).time_us
        bound_us = self.relaxed.lower_bound_us if self.relaxed.status != "infeasible" else 0.0
        return max(real_us, bound_us + real_us - self.relaxed_us)


def _numbers_of_chunks(graph: TrainingGraph) -> Iterator[tuple[ChunkedRegion, ...]]:
    """All regions in the same number of chunks, fewest first."""
    regions = [region for region in graph.regions if region.choices]
    counts = sorted({(one.chunks, one.exact) for region in regions for one in region.choices})
    for chunks, exact in counts:
        having = [
            ChunkedRegion(region.name, chunks, exact)
            for region in regions
            if any((one.chunks, one.exact) == (chunks, exact) for one in region.choices)
        ]
        if len(having) == len(regions):
            yield tuple(having)


def _relaxed(region: Region) -> Choice:
    """A choice that no real one beats: of each op the least time and the least workspace."""
    ops: list[tuple[str, Op]] = []
    for same in zip(*(choice.ops for choice in region.choices), strict=False):
        place, op = same[0]
        cost_us = min(one.cost_us for _, one in same)
        workspace_bytes = min(one.workspace_bytes for _, one in same)
        op = msgspec.structs.replace(op, cost_us=cost_us, workspace_bytes=workspace_bytes)
        ops.append((place, op))
    return msgspec.structs.replace(region.choices[0], ops=tuple(ops))


def _judged(
    graph: TrainingGraph, choices: list[tuple[ChunkedRegion, ...]], budget_bytes: int, found: Result
) -> list[Result]:
    """The schedule of `found`, or its least one, on the graph of each choice."""
    schedule = found.schedule or found.least_schedule
    if schedule is None:
        return []
    pairs = ((in_chunks(graph, chunks), named(schedule, chunks, graph)) for chunks in choices)
    return [
        evaluate_schedule(real, own, budget_bytes=budget_bytes, lower_bound_us=real.time_us)
        for real, own in pairs
    ]


def named(schedule: Schedule, chunks: tuple[ChunkedRegion, ...], graph: TrainingGraph) -> Schedule:
    """`schedule`, which says that it is of `graph` with these chunks."""
    return msgspec.structs.replace(schedule, chunks=chunks, captured_hash=graph.hash)


def _time_us_of(best: Result) -> float:
    return best.time_us if best.schedule is not None else inf


def _rank(result: Result) -> tuple[bool, float, int]:
    """Those that fit come first, by time; others by the least that would."""
    if result.schedule is not None:
        return False, result.time_us, result.peak_bytes
    return True, inf, result.least_feasible_bytes or (1 << 62)


def _bound_us_of(result: Result, graph: TrainingGraph) -> float:
    """No schedule of that graph, whole, takes less within the budget; infinite where none fits."""
    is_proved = 0 < result.budget_bytes < result.least_bound_bytes
    if is_proved and result.schedule is None:
        return inf
    return max(result.lower_bound_us, graph.time_us)  # each op takes its time, bound or none


def _least_us(graph: TrainingGraph) -> float:
    return min(in_chunks(graph, chosen).time_us for chosen in _numbers_of_chunks(graph))


def _most_held_bytes(graph: TrainingGraph) -> int:
    """Resident bytes, and the most that one op of the captured graph reads, makes and works in."""
    return graph.resident.total_bytes + _most_of(graph, graph.ops)


def _most_of(graph: TrainingGraph, ops: Sequence[Op]) -> int:
    size = {value.name: value.size_bytes for value in graph.values if value.producer}
    held = (sum(size.get(name, 0) for name in {*op.inputs, *op.outputs}) for op in ops)
    return max(op.workspace_bytes + size_bytes for op, size_bytes in zip(ops, held, strict=True))


_SAME_TIME = 1 + 1e-9
_FIRST_PART = 2 / 3  # of the time, before MLPs in chunks, where whole ones hardly fit
# Tried where the budget leaves twice what they hold; whole MLPs hardly fit where it leaves once.
_NEAR, _TIGHT = 2, 1


class WholeRegions(Reduction[None]):
    """Hides regions from solvers that plan none in chunks, and weakens what these prove."""

    def accepts(self, question: Question) -> bool:
        return bool(question.graph.regions) and question.solver not in TAKE_CHUNKS

    def solve(self, question: Question, rest: Rest) -> Result:
        # The hash stays: schedules are of the captured graph.
        found = rest(replace(question, graph=unchunked(question.graph)))
        return with_weaker_proofs(found, fastest_us(question.graph), "chunks")


class ChunkedRegions(Reduction[None]):
    """Whether a region runs in chunks, and in how many; asks the rest for each choice of graph."""

    def accepts(self, question: Question) -> bool:
        return bool(question.graph.regions)

    def solve(self, question: Question, rest: Rest) -> Result:
        rest, question = within_its_limit(rest), _whole_where_pinned(question)

        def solve_one(graph: TrainingGraph, limit_s: float, known_us: float) -> Result:
            left_s = max(limit_s, 0.0)
            asked = replace(question, graph=graph, time_limit_s=left_s, known_us=known_us)
            return rest(replace(asked, at_hand=None))  # that outcome is for all regions whole

        # 0 for a solver that proves an optimum.
        default = DEFAULT_GAP if "gap" in option_names(question.solver) else 0.0
        given = question.options.get("gap", default)
        check_number("gap", given)
        return solve_in_chunks(
            question.graph, question.budget_bytes, solve_one, question.time_limit_s,
            gap_for(len(question.graph.ops), cast("float", given)), question.at_hand,
        )  # fmt: skip


def _whole_where_pinned(question: Question) -> Question:
    """Without regions in whose chunks a pin would name nothing that it could pin."""
    graph, regions = question.graph, question.graph.regions
    in_regions = {name for region in regions for name in region.ops}
    outside = [op for op in _forward(graph.ops) if op.name not in in_regions]
    again = [op for op in outside if not why_not_again(op, set(graph.outputs))]

    def is_free(region: Region) -> bool:
        names = set(region.ops)
        own = _forward(op for op in graph.ops if op.name in names)
        chunks = _forward(op for choice in region.choices for _, op in choice.ops)
        wanted = [(glob, [*outside, *chunks]) for glob in question.keep]
        wanted += [(glob, again) for glob in question.recompute]
        return all(_names(glob, left) or not _names(glob, own) for glob, left in wanted)

    return replace(question, graph=_with_regions(graph, list(filter(is_free, regions))))


def _forward(ops: Iterable[Op]) -> list[Op]:
    return [op for op in ops if op.phase == "forward"]


def _names(glob: str, ops: Iterable[Op]) -> bool:
    return any(names_module(glob, op.module) for op in ops)


def solve_in_chunks(
    graph: TrainingGraph, budget_bytes: int, solve_one: _SolveOne, time_limit_s: float, gap: float,
    at_hand: Result | None = None,
) -> Result:  # fmt: skip
    """The fastest, whole or in chunks; choices that cannot win more than `gap` are left out."""
    clock = Clock(time_limit_s)
    regions = [region for region in graph.regions if region.choices]
    later = [region for region in regions if "mlp" in region.kinds]
    room = min((_room(graph, region, budget_bytes) for region in later), default=inf)
    may_be_needed = room <= _NEAR
    heads = _with_regions(graph, [region for region in regions if region not in later])
    with clock.limited_to((_FIRST_PART if room <= _TIGHT else 1) * time_limit_s):
        known = _solve_heads(heads, budget_bytes, solve_one, clock, gap, at_hand)
    best = known.best.schedule or known.best.least_schedule
    has_heads = best is not None and bool(best.chunks)
    # Those with the heads as these turned out, then others, for their bound.
    for region in sorted(later, key=lambda one: ("head" in one.kinds) is not has_heads):
        one = _with_regions(graph, [region])
        if _is_near(known.best, one, 0.0):  # no choice is faster, nor lowers the bound
            continue
        if may_be_needed and clock.left_s > 0 and not _is_near(known.best, one, gap):
            known = _solve_region(one, budget_bytes, solve_one, clock, known, gap)
            may_be_needed = False
        else:
            # Each op once is all that is proved.
            known = _Known(known.best, min(known.bound_us, _least_us(one)))
    return known.best if known.is_whole else _concluded(graph, known, clock)


def _solve_heads(
    graph: TrainingGraph, budget_bytes: int, solve_one: _SolveOne, clock: Clock, gap: float,
    at_hand: Result | None,
) -> _Known:  # fmt: skip
    if not graph.regions:
        found = at_hand or solve_one(unchunked(graph), clock.left_s, inf)
        return _Known(found, _bound_us_of(found, graph), is_whole=True)
    if _most_held_bytes(graph) > budget_bytes:
        return _solve_region(graph, budget_bytes, solve_one, clock, None, gap)
    captured = at_hand or solve_one(unchunked(graph), _PART * clock.left_s, inf)
    known = _Known(captured, _bound_us_of(captured, graph), is_whole=True)
    if _is_near(captured, graph, 0.0):  # chunks with fewer products may be faster than the whole
        return known
    if _is_near(captured, graph, gap):
        return _Known(captured, min(known.bound_us, _least_us(graph)))
    return _solve_region(graph, budget_bytes, solve_one, clock, known, gap)


def _is_near(found: Result, graph: TrainingGraph, gap: float) -> bool:
    """Whether no choice of the regions of `graph` is faster than `found` by more than `gap`."""
    return found.schedule is not None and found.time_us <= _least_us(graph) * (_SAME_TIME + gap)


def _with_regions(graph: TrainingGraph, regions: Sequence[Region]) -> TrainingGraph:
    """`graph` with some of its regions; its hash is the same."""
    return msgspec.structs.replace(graph, regions=tuple(regions))


def _room(graph: TrainingGraph, region: Region, budget_bytes: int) -> float:
    """How often what a region holds fits, beside what is resident or there at the end."""
    own, size = set(region.ops), graph.value_by_name
    held_bytes = _most_of(graph, [op for op in graph.ops if op.name in own])
    made = (size[name] for name in graph.outputs)
    outputs_bytes = sum(value.size_bytes for value in made if value.producer)
    return (budget_bytes - graph.resident.total_bytes - outputs_bytes) / max(held_bytes, 1)


def _concluded(graph: TrainingGraph, known: _Known, clock: Clock) -> Result:
    best = known.best
    bound_us = known.bound_us if known.bound_us < inf else graph.time_us
    is_proved = best.schedule is not None and best.time_us <= bound_us * _SAME_TIME
    status = best.status
    if best.schedule is not None:
        is_late = clock.left_s <= 0
        status = "optimal" if is_proved else ("time limit" if is_late else "feasible")
    return msgspec.structs.replace(  # a bound on the peak is of one choice
        best, status=status, wall_s=clock.elapsed_s, least_bound_bytes=0,
        lower_bound_us=min(bound_us, best.time_us) if is_proved else bound_us,
    )  # fmt: skip
