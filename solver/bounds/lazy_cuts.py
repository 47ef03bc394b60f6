"""Lazy multi-cut: cuts, and rows inside stages, added where the expanded point is too full.

Begins with one cut. The point of each program is expanded into a schedule; its fullest
stage over the budget, stages next to a cut counting less, becomes the next cut. Where it
is one already, the stage before it does, so that the stage stands alone; and then the op
that is fullest when it runs again gets a row (`stage_rows`). The bounds hold in the given
order of first computations, for any number of recomputations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import CutProgram, CutSolution, expand
from remat.solver.problem import Problem
from remat.solver.spans import add_spans
from remat.solver.stage import fullest_op
from remat.solver.stage_rows import add_stage_row
from remat.solver.state import State

PLACES = 30
"""Stages over the budget that are looked at for the next cut."""
FAR, AT_A_CUT = 4.0, 0.01
"""Bytes over the budget count times the stages to the nearest cut, up to `FAR` of them."""


@dataclass(frozen=True, slots=True)
class Climbed:
    """One program solved: the solution, and its expansion where it has a point."""

    solution: CutSolution
    start: State | None


@dataclass(slots=True)
class LazyCuts:
    """The cuts so far, and what to add to them.

    Attributes
    ----------
    cuts : ops at which there is a cut, ascending; `added` has them in order of addition.
    rows : (stage, op) with a row each.
    bound_us : the best bound proved. is_done : whether there is nothing to add.
    is_exact : whether the program of now is to be solved without any tolerance: its point fits.
    """

    problem: Problem
    budget_bytes: int
    cuts: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()
    bound_us: float = 0.0
    is_done: bool = False
    is_exact: bool = False
    added: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.added = self.cuts

    def program(self) -> CutProgram:
        """The program of the cuts and rows so far."""
        made = CutProgram(self.problem, self.cuts, self.budget_bytes)
        for stage, op in self.rows:
            add_stage_row(made, self.cuts.index(stage), op)
        add_spans(made, self.added)
        return made

    def climb(self, limits: Limits) -> Climbed:
        """Solve the program of now, take over its bound, add what its point violates most.

        A program that a limit ended stays as it is, to be taken further.
        """
        solution = self.program().solve(limits)
        self.bound_us = max(self.bound_us, solution.bound_us)
        start = None
        if solution.values is not None:
            start = State.from_recomputed(self.problem, expand(solution))
        if solution.finished and (start is None or not self._refine(start)):
            self.is_done = start is None or self.is_exact
            self.is_exact = True
        return Climbed(solution, start)

    def _refine(self, state: State) -> bool:
        """Add what `state`, an expansion, violates most; return whether there was something."""
        n_ops = self.problem.n_ops
        over = (state.peak_bytes[:n_ops] - self.budget_bytes).astype(float)
        distance = np.abs(np.arange(n_ops)[:, None] - np.array(self.cuts)[None, :]).min(axis=1)
        over = np.where(over > 0, over * np.clip(distance, AT_A_CUT, FAR), over)
        for stage in np.argsort(-over, kind="stable")[:PLACES].tolist():
            if over[stage] <= 0:
                return False
            if self._add_at(state, stage):
                return True
        return False

    def _add_at(self, state: State, stage: int) -> bool:
        for place in (stage, stage - 1):
            if place >= 0 and place not in self.cuts:
                self.cuts = tuple(sorted((*self.cuts, place)))
                self.added = (*self.added, place)
                return True
        op = fullest_op(
            self.problem, state.rows[stage], state.rows[stage + 1], stage,
            state.stages[stage].recomputed,
        )  # fmt: skip
        if op is None or (stage, op) in self.rows or stage == 0:
            return False
        self.rows = (*self.rows, (stage, op))
        return True
