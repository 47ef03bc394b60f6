"""Whether a sequence of ops keeps to the order in which they were captured."""

from __future__ import annotations

from collections.abc import Sequence

from remat.solver.problem import Problem


def keeps_order(problem: Problem, sequence: Sequence[int]) -> bool:
    """Whether every op runs, and first runs are in the problem's order."""
    following = 0
    for op in sequence:
        if op > following:
            return False
        following += op == following
    return following == problem.n_ops
