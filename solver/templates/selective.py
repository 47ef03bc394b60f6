"""Recompute the core of each attention and keep all else.

Also called: selective activation recomputation, core attention recomputation.
Paper: V. Korthikanti, J. Casper, S. Lym, L. McAfee, M. Andersch, M. Shoeybi, B. Catanzaro,
"Reducing Activation Recomputation in Large Transformer Models", 2022,
https://arxiv.org/abs/2205.05198.
Solves: no stated problem; the budget only decides whether recomputation is needed at all. What
lies between queries, keys, values and the attention output (`attention_core`) is large for its
cost. It runs again when backward reaches it, one attention at a time.
Optimal: where the step fits without recomputation. Cost: O(ops + reads).
Shortcomings: gains little with fused attention, which never keeps the weights and runs again
whole; keeps every linear layer's input; does not apply where no attention is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.attention_core import NO_ATTENTION, NO_CORE, attention_cores
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.templates.template import Template, regions, solve_templates


@dataclass(frozen=True)
class Selective:
    """Solver that recomputes attention cores; `time_limit_s`, `progress` as in `solve`."""

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else all attention cores recomputed, if that does."""
        search = Search.of(self, "selective", graph, budget_bytes)
        return solve_templates(search, selective_templates, NO_ATTENTION)


def selective_templates(problem: Problem) -> Iterator[Template]:
    """The template with each core a region of its own; none where there is no attention."""
    core = attention_cores(problem)
    again = [part != NO_CORE for part in core]
    if any(again):
        yield regions(problem, again, core)
