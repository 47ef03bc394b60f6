"""Lazy multi-cut: cuts, and rows inside stages, added where the expanded point is too full.

Begins with one cut. The point of each program is expanded into a schedule; its fullest
stage over the budget becomes the next cut, or, if it is one, the stage before it does, so
that the stage stands alone; and then the op that is fullest when it runs again gets a
row (`stage_rows`). The bounds hold in the given order of first computations, for any
number of recomputations. They never fall: each is a row of the next program.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.solver.cut_bound import CutProgram, CutSolution, expand
from remat.solver.mip import Limits
from remat.solver.problem import Problem
from remat.solver.replay import fullest_op
from remat.solver.stage_rows import add_stage_row
from remat.solver.stages import State

PLACES = 30
"""Stages over the budget that are looked at for the next cut."""


@dataclass(slots=True)
class LazyCuts:
    """The cuts so far, and what to add to them.

    Attributes
    ----------
    cuts : ops at which there is a cut, ascending. rows : (stage, op) with a row each.
    bound_us : the best bound proved.
    """

    problem: Problem
    budget_bytes: int
    cuts: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()
    bound_us: float = 0.0

    def program(self) -> CutProgram:
        """The program of the cuts and rows so far, between the bounds known."""
        made = CutProgram(self.problem, self.cuts, self.budget_bytes)
        for stage, op in self.rows:
            add_stage_row(made, self.cuts.index(stage), op)
        base_us = sum(self.problem.cost_us)
        terms = [(x, cost) for x, cost in enumerate(made.program.objective) if cost]
        if terms and self.bound_us > base_us:
            lower = (self.bound_us - base_us) / made.cost_unit_us
            made.program.row(terms, lower=lower * (1 - 1e-7) - 1e-6)
        return made

    def solve(self, limits: Limits) -> CutSolution:
        """Solve the program of now; its bound is taken over by `note`."""
        return self.program().solve(limits)

    def note(self, solution: CutSolution) -> None:
        """Take over the bound of `solution`."""
        self.bound_us = max(self.bound_us, solution.bound_us)

    def refine(self, solution: CutSolution) -> State | None:
        """Add what the expansion of `solution` violates most.

        Returns the expansion, or None where there is no point or nothing to add.
        """
        if solution.values is None:
            return None
        state = State.from_recomputed(self.problem, expand(solution))
        return state if self._add(state) else None

    def _add(self, state: State) -> bool:
        over = state.peak_bytes[: self.problem.n_ops] - self.budget_bytes
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
                return True
        op = fullest_op(
            self.problem, state.rows[stage], state.rows[stage + 1], stage,
            state.stages[stage].recomputed,
        )  # fmt: skip
        if op is None or (stage, op) in self.rows or stage == 0:
            return False
        self.rows = (*self.rows, (stage, op))
        return True

