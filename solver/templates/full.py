"""Recompute every block: only what enters a block is kept.

Also called: full recomputation, full activation checkpointing, `torch.utils.checkpoint` around
each layer.
Paper: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016, https://arxiv.org/abs/1604.06174, whose segments are here the blocks of the
model (`module_blocks`).
Solves: no stated problem; the budget only decides whether recomputation is needed at all. Each
block runs again when backward reaches it, up to the last op whose result backward reads.
Optimal: where the step fits without recomputation. Cost: O(ops + reads).
Shortcomings: recomputes what would have fitted; adds up to the whole forward of the blocks,
a third of a step as a rule; does not apply where no block repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.templates.module_blocks import NO_BLOCK, NO_REPEATED_BLOCK, module_blocks
from remat.solver.templates.template import Template, regions, solve_templates


@dataclass(frozen=True)
class Full:
    """Solver that recomputes every block; `time_limit_s`, `progress` as in `solve`."""

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else every block recomputed, if that does."""
        search = Search.of(self, "full", graph, budget_bytes)
        return solve_templates(search, full_templates, NO_REPEATED_BLOCK)


def full_templates(problem: Problem) -> Iterator[Template]:
    """The template with each block a region of its own; none where no block repeats."""
    blocks = module_blocks(problem.graph)
    if blocks.names:
        yield regions(problem, [block != NO_BLOCK for block in blocks.of_op], blocks.of_op)
