"""Lazy multi-cut: cuts, and rows inside stages, added where the expanded point is too full.

It begins with one cut. The point of each program is expanded into a schedule, and the stage
of that which is fullest over the budget becomes the next cut. If there is a cut already, the
stage before it becomes one, so that the stage stands alone. If there is one too, the op that
is fullest when it runs again gets a row (`add_stage_row`). Such rows close what cuts leave
open where recomputing itself is what needs the memory. The bounds hold in the given order of
first computations, for any number of recomputations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import CutProgram, CutSolution, add_stage_row, expand
from remat.solver.problem import Problem
from remat.solver.state import State, fullest_op

_PLACES = 30
"""Stages over the budget that are looked at for the next cut."""
FAR, AT_A_CUT = 4.0, 0.01
"""Bytes over the budget count times the stages to the nearest cut, up to `FAR` of them: a cut
beside another says little that is new."""

_FLOOR_SLACK = 1e-6
"""Part of a proved time by which a row that says it is looser."""

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
    # The program as it is now is to be solved without tolerance: its point fits, so no further cut
    # will replace it.
    is_exact: bool = False
    # Cuts are added from op `begin` to op `end` - 1, and no stage after `end` counts.
    begin: int = 0
    end: int | None = None
    # (t, last, least): what runs again in the intervals of cuts from t to before `last` takes at
    # least so many us, as a program of these alone proved.
    floors: tuple[_Floor, ...] = ()
    added: tuple[int, ...] = ()  # `cuts` in order of addition

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
        return made

    def climb(self, limits: Limits) -> Climbed:
        """Solve the program as it is now, take its bound, add what its point violates most."""
        solution = self.program().solve(limits)
        self.bound_us = max(self.bound_us, solution.bound_us)
        start = None
        if solution.values is not None:
            start = State.from_recomputed(self._until_end(), expand(solution))
        # A program that a limit ended stays as it is, and is taken further next time.
        if solution.finished and (start is None or not self._refine(start)):
            self.is_done = start is None or self.is_exact
            self.is_exact = True
        return Climbed(solution, start)

    def _until_end(self) -> Problem:
        # The program carries nothing for later stages, and nor must the expansion of its point.
        if self.end is None:
            return self.problem
        needs = self.problem.needs[: self.end + 1]
        later = ((),) * (self.problem.n_ops - self.end)
        return replace(self.problem, needs=(*needs, *later))

    def _refine(self, state: State) -> bool:
        """Returns whether there was anything to add."""
        n_ops = self.problem.n_ops
        over = (state.peak_bytes[:n_ops] - self.budget_bytes).astype(float)
        over[: self.begin] = 0.0
        over[self.last_stage :] = 0.0
        distance = np.abs(np.arange(n_ops)[:, None] - np.array(self.cuts)[None, :]).min(axis=1)
        over = np.where(over > 0, over * np.clip(distance, AT_A_CUT, FAR), over)
        for stage in np.argsort(-over, kind="stable")[:_PLACES].tolist():
            if over[stage] <= 0:
                return False
            if self._add_at(state, stage):
                return True
        return False

    def _add_at(self, state: State, stage: int) -> bool:
        # Where there is a cut already, one before it lets the stage stand alone.
        for place in (stage, stage - 1):
            if place >= self.begin and place not in self.cuts:
                self.cuts = tuple(sorted((*self.cuts, place)))
                self.added = (*self.added, place)
                return True
        # It stands alone: what runs again inside it takes the memory.
        op = fullest_op(
            self.problem, state.rows[stage], state.rows[stage + 1], stage,
            state.stages[stage].recomputed,
        )  # fmt: skip
        if op is None or (stage, op) in self.rows or stage == 0:
            return False
        self.rows = (*self.rows, (stage, op))
        return True


def _add_spans(made: CutProgram, added: Sequence[int]) -> None:
    """Rows for each interval that `added`, the cuts in order of their addition, has split."""
    # They keep what was said of the whole interval. Without them the linear relaxation falls when
    # cuts are added, as measured on layered graphs.
    end = made.last_stage
    places = [*made.cuts, end]
    runs: dict[_Interval, dict[int, int]] = {
        (places[k], places[k + 1]): dict(made.again[k]) for k in range(len(made.cuts))
    }
    # The last split first: what it split is a half of something split before.
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
    # Less a little: the bound is as exact as the tolerances of HiGHS.
    made.program.row(terms, lower=(1 - _FLOOR_SLACK) * least_us / unit_us)


def _splits(added: Sequence[int], end: int) -> list[tuple[int, int, int]]:
    """Which interval each cut has split: its first cut, the new one, its last."""
    found: list[tuple[int, int, int]] = []
    for i, t in enumerate(added):
        before = [other for other in added[:i] if other < t]
        if before:
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
