"""Recompute every block but for its attention, whose output is kept.

Also called: rematerialization-aware gradient checkpointing; checkpoint at the attention output.
Paper: D. Li, R. Shao, A. Xie, E. P. Xing, X. Ma, I. Stoica, J. E. Gonzalez, H. Zhang,
"DISTFLASHATTN: Distributed Memory-efficient Attention for Long-context LLMs Training", 2023,
https://arxiv.org/abs/2310.03294.
Solves: no stated problem; the budget only decides whether recomputation is needed at all.
Forward keeps what enters a block and what attention gives its backward: the output, the
log-sum-exp, states of the generator. Attention runs once. The part after it and the part before
it run again, each when backward reaches it. The paper joins the part after one attention with
the part before the next; what is kept is the same.
Optimal: where the step fits without recomputation. Cost: O(ops + reads).
Shortcomings: attention that is not fused keeps its weights, which are large; keeps nothing of
the rest even where it would fit; applies only where blocks repeat and attention is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.attention_core import NO_ATTENTION, NO_CORE, attention_cores
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.templates.module_blocks import NO_BLOCK, NO_REPEATED_BLOCK, module_blocks
from remat.solver.templates.template import Template, regions, solve_templates


@dataclass(frozen=True)
class KeepAttentionOutput:
    """Solver that recomputes blocks, not attention; `time_limit_s`, `progress` as in `solve`."""

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else the template, if that does."""
        search = Search.of(self, "keep_attention_output", graph, budget_bytes)
        has_blocks = bool(module_blocks(graph).names)
        absent = NO_ATTENTION if has_blocks else NO_REPEATED_BLOCK
        return solve_templates(search, keep_attention_output_templates, absent)


def keep_attention_output_templates(problem: Problem) -> Iterator[Template]:
    """The template; none where no block repeats or no block has attention."""
    blocks = module_blocks(problem.graph).of_op
    core = attention_cores(problem)
    ops = range(problem.n_forward)
    if any(blocks[op] != NO_BLOCK and core[op] != NO_CORE for op in ops):
        again = [blocks[op] != NO_BLOCK and core[op] == NO_CORE for op in ops]
        yield regions(problem, again, blocks)
