"""Lazy multi-cut, of the whole step and in windows: cuts added where the point is too full.

The point of each program is expanded into a schedule, whose stage fullest over the budget becomes
the next cut; if it is one already, the stage before it; if that is one too, the op fullest when it
runs again gets a row (`add_stage_row`). Bounds hold in captured order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import Floats
from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import (
    COST_SCALE,
    CutProgram,
    CutSolution,
    add_stage_row,
    expand,
)
from remat.solver.problem import Problem
from remat.solver.state import Bytes, State, fullest_op

_PLACES = 30  # stages over the budget that are looked at for the next cut
# Bytes over budget times stages to the nearest cut, at most `_FAR`: cuts side by side say little.
_FAR, _AT_A_CUT = 4.0, 0.01

_FLOOR_SLACK = 1e-6  # part of a proved time by which a row that says it is looser

_Interval = tuple[int, int]
_Floor = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class Climbed:
    solution: CutSolution
    start: State | None


@dataclass(slots=True)
class LazyCuts:
    problem: Problem
    budget_bytes: int
    cuts: tuple[int, ...]  # ascending
    rows: tuple[tuple[int, int], ...] = ()  # (stage, op)
    bound_us: float = 0.0
    is_done: bool = False
    is_exact: bool = False  # without tolerance: the point fits, so no cut replaces it
    begin: int = 0  # cuts go from `begin` to `end` - 1; no stage after `end` counts
    end: int | None = None
    # (t, last, least): intervals of cuts from t to before `last` take at least so many us.
    floors: tuple[_Floor, ...] = ()
    added: tuple[int, ...] = ()  # `cuts` in order of addition
    n_rows: int = 0  # of the program that was made last

    def __post_init__(self) -> None:
        self.added = self.added or self.cuts

    @property
    def last_stage(self) -> int:
        return self.problem.n_ops if self.end is None else self.end

    def program(self) -> CutProgram:
        made = CutProgram(self.problem, self.cuts, self.budget_bytes, self.end)
        for stage, op in self.rows:
            add_stage_row(made, self.cuts.index(stage), op)
        _add_spans(made, self.added)
        for floor in self.floors:
            _add_floor(made, floor)
        self.n_rows = len(made.program.rows)
        return made

    def climb(self, limits: Limits, below_us: float = inf) -> Climbed:
        """Solve the program as it is now, take its bound, add what its point violates most.

        Points of `below_us` or more may be left out.
        """
        program = self.program()
        if below_us < inf:
            program.ask_for_less(below_us)
        solution = program.solve(limits)
        self.bound_us = max(self.bound_us, solution.bound_us)
        start = None if solution.values is None else self._expanded(solution)
        # A program that a limit ended is taken further next time.
        if solution.finished and (start is None or not self._refine(start)):
            self.is_done = start is None or self.is_exact
            self.is_exact = True
        return Climbed(solution, start)

    def _expanded(self, solution: CutSolution) -> State:
        problem = self.problem
        if self.end is not None:  # the program carries nothing for later stages
            later = ((),) * (problem.n_ops - self.end)
            problem = replace(problem, needs=(*problem.needs[: self.end + 1], *later))
        return State.from_recomputed(problem, expand(solution))

    def climb_relaxed(self, cuts: int, iterations: int, time_limit_s: float) -> Iterator[State]:
        """Add cuts up to so many by relaxed points, until these took so many iterations.

        Yields their starts, `bound_us` being raised.
        """
        left = iterations
        while len(self.cuts) < cuts and left > 0:
            solution = self.program().relaxed(time_limit_s)
            self.bound_us = max(self.bound_us, solution.bound_us)
            left -= 1 + solution.iterations  # presolve may leave none
            if solution.values is None:
                return
            yield (start := self._expanded(solution))
            if not self._refine(start):
                return

    def _refine(self, state: State) -> bool:
        """Returns whether there was anything to add."""
        over_bytes = state.peak_bytes[: self.problem.n_ops] - self.budget_bytes
        over_bytes[: self.begin] = 0
        over_bytes[self.last_stage :] = 0
        over = crowding(over_bytes, self.cuts)
        for stage in np.argsort(-over, kind="stable")[:_PLACES].tolist():
            if over[stage] <= 0:
                return False
            if self._add_at(state, stage):
                return True
        return False

    def _add_at(self, state: State, stage: int) -> bool:
        for place in (stage, stage - 1):  # one before a cut lets its stage stand alone
            if place >= self.begin and place not in self.cuts:
                self.cuts = tuple(sorted((*self.cuts, place)))
                self.added = (*self.added, place)
                return True
        op = fullest_op(  # alone, what runs again inside it takes the memory
            self.problem, state.rows[stage], state.rows[stage + 1], stage,
            state.stages[stage].recomputed,
        )  # fmt: skip
        if op is None or (stage, op) in self.rows or stage == 0:
            return False
        self.rows = (*self.rows, (stage, op))
        return True


def crowding(over_bytes: Bytes, cuts: Sequence[int]) -> Floats:
    """How much each stage asks for a cut."""
    distance = np.abs(np.arange(len(over_bytes))[:, None] - np.array(cuts)[None, :]).min(axis=1)
    over = over_bytes.astype(float)
    return np.where(over > 0, over * np.clip(distance, _AT_A_CUT, _FAR), over)


def _add_spans(made: CutProgram, added: Sequence[int]) -> None:
    """Rows for each interval that `added`, cuts in order of addition, has split."""
    end = made.last_stage  # without them the relaxation fell on layered graphs
    places = [*made.cuts, end]
    runs: dict[_Interval, dict[int, int]] = {
        (places[k], places[k + 1]): dict(made.again[k]) for k in range(len(made.cuts))
    }
    # The last split first: it halves what an earlier one split.
    for first, between, last in reversed(_splits(added, end)):
        left, right = runs[first, between], runs[between, last]
        runs[first, last] = _add_span(made, (first, last), left, right)


def _add_floor(made: CutProgram, floor: _Floor) -> None:
    """Σ cost · again over the intervals that `floor` names >= what was proved of them."""
    first, last, least_us = floor
    unit_us = made.cost_unit_us
    terms = [
        (index, made.problem.cost_us[op] / unit_us)
        for t, runs in zip(made.cuts, made.again, strict=True)
        if first <= t < last
        for op, index in runs.items()
        if made.problem.cost_us[op]
    ]
    # A little less: the bound is only as exact as HiGHS.
    made.program.row(terms, lower=(1 - _FLOOR_SLACK) * least_us / unit_us)


def _splits(added: Sequence[int], end: int) -> list[tuple[int, int, int]]:
    """Which interval each cut has split: its first cut, the new one, its last."""
    found: list[tuple[int, int, int]] = []
    for i, t in enumerate(added):
        if before := [other for other in added[:i] if other < t]:
            found.append((max(before), t, min((u for u in added[:i] if u > t), default=end)))
    return found


def _add_span(
    made: CutProgram, span: _Interval, left: dict[int, int], right: dict[int, int]
) -> dict[int, int]:
    """halves <= again in the span <= sum of halves"""
    k = made.cuts.index(span[0])
    runs: dict[int, int] = {}
    for op, half in left.items():
        runs[op] = made.program.variable(integer=True)  # whole, so that it can be branched on
        halves = [(half, 1.0)] + ([(right[op], 1.0)] if op in right else [])
        made.program.row([*halves, (runs[op], -1.0)], lower=0.0)
        for index, _ in halves:
            made.program.row([(runs[op], 1.0), (index, -1.0)], lower=0.0)
    made.needs_inputs(k, runs)
    made.cover(k, made.wanted_between(*span), runs)
    if span[1] in made.cuts:
        made.carry_what_is_there(made.cuts.index(span[1]), k, runs)
    return runs


# Windows: cuts of separate stretches of stages. What runs again in one does not in another, so
# their least times, by programs of their own, add up to a bound. Where memory is full in many
# places, one program of all cuts is too slow, and these take a moment each. A value dropped in one
# window and run again in the next costs neither. So solved neighbours are merged: both sets of
# cuts, and rows by which each part costs what was proved of it. The last window is the whole step.
# Source: a sum of relaxations of disjoint parts, as in Lagrangian decomposition (Guignard and Kim
# 1987, https://doi.org/10.1007/BF02592954) with all multipliers at zero.

_SHARED = 0.5  # of what is live in one full stage, live in the next too: one window has both
_Stages = npt.NDArray[np.int64]
_NEAR = 3  # stages between first cuts of a window: nearer ones say little new
_FIRST_CUTS = 8  # of a window at most; others come where its point is over the budget
_CLOSE = 2e-4  # of the step that windows may leave open together: unlike one cut's, they stay
_PATIENCE = 0.5  # how much less a window is worth another try after each limit


class Windows:
    """Windows in the order of their stages, and their bound together."""

    def __init__(
        self, problem: Problem, parts: list[LazyCuts], bound_us: float = 0.0,
        start: State | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.parts, self.bound_us = problem, parts, bound_us
        self.start = start  # of programs that were solved before
        # What the best schedule runs again in each stage: windows far above their proof come first.
        self.spent_us: Sequence[float] = ()
        self.solutions: list[CutSolution | None] = [None] * len(parts)  # the last one of each
        self.late = [0] * len(parts)  # how often limits ended each
        self.base_us = sum(problem.cost_us)  # of computing every op once

    @property
    def is_done(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].is_done

    @property
    def is_exact(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].is_exact

    def climb(self, limits: Limits, below_us: float = inf) -> Climbed:
        """Solve the program of one window; merge two where all are done."""
        at = self._next()
        is_last_untried = sum(part.bound_us == 0 for part in self.parts) == 1
        # A program that ended in time says more without: its bound may come to lie above.
        below_us = below_us - self._others_us(at) if self.late[at] else inf
        climbed = self.parts[at].climb(self._own_limits(limits, at), below_us)
        if climbed.solution.values is not None:
            self.solutions[at] = climbed.solution
        self.late[at] += not climbed.solution.finished
        is_one = len(self.parts) == 1
        summed_us = self.base_us + sum(map(self._least_us, self.parts))
        self.bound_us = max(self.bound_us, self.parts[0].bound_us if is_one else summed_us)
        start = climbed.start
        if not is_one:
            all_settled = all(map(self._is_settled, self.parts))
            # A start takes all windows: once each was tried, and after merges.
            is_due = all_settled or is_last_untried
            start = self._start_of(self.solutions) if is_due else None
            if all_settled:
                self._merge_widest()
        return Climbed(replace(climbed.solution, bound_us=self.bound_us), start)

    def copy(self) -> Windows:
        """Of the programs as they are now."""
        return Windows(self.problem, [replace(part) for part in self.parts], self.bound_us)

    @property
    def n_rows(self) -> int:
        """Rows of the next program, about: as many as there were before its last cut."""
        return self.parts[self._next()].n_rows

    def relaxed_us(self, time_limit_s: float) -> list[float]:
        """By window, the least time of what it must run again."""
        return [part.program().relaxed(time_limit_s).bound_us - self.base_us for part in self.parts]

    def relaxed_start(self, budget_bytes: int, time_limit_s: float) -> State | None:
        """A start from relaxations at another budget; None where a window has no point."""
        solutions: list[CutSolution] = []
        for part in self.parts:
            lower = replace(part, budget_bytes=budget_bytes).program()
            solutions.append(lower.relaxed(time_limit_s))
            if solutions[-1].values is None:
                return None
        return self._start_of(solutions)

    def _own_limits(self, limits: Limits, at: int) -> Limits:
        nodes = limits.node_limit and limits.node_limit << self.late[at]  # more after a limit
        if len(self.parts) == 1:
            return replace(limits, node_limit=nodes)
        # Bounds add up, so each has its part of the tolerance.
        gap = min(limits.absolute_gap, _CLOSE * COST_SCALE) / len(self.parts)
        return replace(limits, absolute_gap=gap, node_limit=nodes)

    def _is_settled(self, part: LazyCuts) -> bool:
        return part.is_done or (part.is_exact and len(self.parts) > 1)  # the last is exact too

    def _least_us(self, part: LazyCuts) -> float:
        return max(part.bound_us - self.base_us, 0.0)

    def _others_us(self, at: int) -> float:
        return sum(self._least_us(part) for i, part in enumerate(self.parts) if i != at)

    def _next(self) -> int:
        still_open = [i for i, part in enumerate(self.parts) if not self._is_settled(part)]
        untried = [i for i in still_open if self.parts[i].bound_us == 0]
        if untried or not still_open:
            return (untried or [0])[0]
        return max(still_open, key=lambda i: (self._slack_us(i) * _PATIENCE ** self.late[i], -i))

    def _slack_us(self, at: int) -> float:
        """What the best schedule spends in a window beyond what is proved of it."""
        part = self.parts[at]
        stages = slice(part.cuts[0] + 1, part.last_stage + 1)
        return sum(self.spent_us[stages]) - self._least_us(part)

    def _merge_widest(self) -> None:
        """Merge the neighbours on which the best schedule spends most beyond what is proved."""
        slack_us = [self._slack_us(i) for i in range(len(self.parts))]
        at = max(range(len(self.parts) - 1), key=lambda i: (slack_us[i] + slack_us[i + 1], -i))
        left, right = self.parts[at : at + 2]
        merged = LazyCuts(
            self.problem, left.budget_bytes, (*left.cuts, *right.cuts), (*left.rows, *right.rows),
            self.base_us + self._least_us(left) + self._least_us(right),
            begin=left.begin, end=right.end, added=(*left.added, *right.added),
            # The merged program begins with what was proved of its parts.
            floors=(*self._floors(left), *self._floors(right)),
        )  # fmt: skip
        self.parts[at : at + 2] = [merged]
        self.solutions[at : at + 2] = [None]
        self.late[at : at + 2] = [0]

    def _floors(self, part: LazyCuts) -> tuple[tuple[int, int, float], ...]:
        own = (part.cuts[0], part.last_stage, self._least_us(part))
        return (*part.floors, own) if own[2] > 0 else part.floors

    def _start_of(self, solutions: Sequence[CutSolution | None]) -> State:
        """What the windows run again, each in its own stages; the rest is carried."""
        runs: list[list[int]] = [[] for _ in range(self.problem.n_ops + 1)]
        for part, solution in zip(self.parts, solutions, strict=True):
            if solution is not None:
                own = slice(solution.source.cuts[0] + 1, part.last_stage + 1)
                runs[own] = expand(solution)[own]
        return State.from_recomputed(self.problem, runs)


def windows_of(problem: Problem, budget_bytes: int, peak_bytes: Bytes) -> Windows:
    """A window for each group of stretches of stages whose `peak_bytes` are over the budget."""
    over = np.flatnonzero(peak_bytes[: problem.n_ops] > budget_bytes)
    cuts = [first_cuts(peak_bytes, group) for group in _groups(problem, peak_bytes, over)]
    begins = [0, *(min(chosen) for chosen in cuts[1:])]
    parts = [
        LazyCuts(problem, budget_bytes, tuple(sorted(own)), begin=begin, end=end, added=tuple(own))
        for own, begin, end in zip(cuts, begins, [*begins[1:], None], strict=True)
    ]
    return Windows(problem, parts)


def _groups(problem: Problem, peak_bytes: Bytes, over: _Stages) -> list[list[int]]:
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if over.size else []
    produced = np.array(problem.producer)
    last_read = np.array([max((op, *problem.readers[op])) for op in problem.producer])
    size_bytes = np.array(problem.size_bytes)
    groups: list[list[int]] = []
    before = 0
    for stretch in stretches:
        fullest = int(stretch[np.argmax(peak_bytes[stretch])])
        is_live = (produced <= before) & (last_read >= before)
        total_bytes = size_bytes[is_live].sum()
        shared_bytes = size_bytes[is_live & (last_read >= fullest)].sum()
        # What is dropped for one stretch then helps the other.
        if not groups or shared_bytes < _SHARED * total_bytes:
            groups.append([])
        groups[-1] += stretch.tolist()
        before = fullest
    return groups


def first_cuts(peak_bytes: Bytes, stages: Sequence[int]) -> list[int]:
    """The fullest of `stages`, none near another, the fullest first."""
    chosen: list[int] = []
    for stage in sorted(stages, key=lambda t: (-int(peak_bytes[t]), t)):
        if all(abs(stage - other) >= _NEAR for other in chosen):
            chosen.append(stage)
    return chosen[:_FIRST_CUTS]
