"""Recompute one block in every n, or keep what enters every n-th block.

Also called: selective layer checkpointing, `every_n_layers`; uniform: "recompute-num-layers".
Paper: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022, https://arxiv.org/abs/2205.05198, discusses recomputing some of the layers; ``uniform`` is
T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
https://arxiv.org/abs/1604.06174, with segments of whole blocks.
Solves: least time within the budget over the one knob n. With method ``nth``, blocks 0, n, 2n, …
of each container run again and the others keep all. With ``uniform``, every block runs again,
and n blocks in a row are one segment.
Optimal: where the step fits without recomputation. Cost: O(ops + reads) for each n tried.
Shortcomings: the knob is coarse; all blocks count alike; blind to costs and sizes; does not
apply where no block repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.templates.module_blocks import NO_BLOCK, NO_REPEATED_BLOCK, Blocks, module_blocks
from remat.solver.templates.template import Template, check_choice, regions, solve_templates

METHODS = ("nth", "uniform")


@dataclass(frozen=True)
class EveryNLayers:
    """Solver with one knob.

    Attributes
    ----------
    n : 0 tries every n up to the number of blocks and takes the fastest that fits.
    method : ``nth`` recomputes blocks 0, n, 2n, …; ``uniform`` checkpoints n in a row.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    n: int = 0
    method: str = "nth"
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        if self.n < 0:
            raise SolverError(f"n must be 0 (every n is tried) or more, not {self.n}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else the fastest n that does."""
        search = Search.of(self, "every_n_layers", graph, budget_bytes)
        return solve_templates(search, self.templates, NO_REPEATED_BLOCK)

    def templates(self, problem: Problem) -> Iterator[Template]:
        """One template for each n to try; none where no block repeats."""
        blocks = module_blocks(problem.graph)
        if not blocks.names:
            return
        make = nth_blocks if self.method == "nth" else uniform_blocks
        most = max(blocks.rank) + 1
        for n in [self.n] if self.n else range(1, most + 1):
            yield make(problem, blocks, n)


def nth_blocks(problem: Problem, blocks: Blocks, n: int) -> Template:
    """Blocks 0, n, 2n, … of each container run again, each a region."""
    again = [block != NO_BLOCK and blocks.rank[block] % n == 0 for block in blocks.of_op]
    return regions(problem, again, blocks.of_op)


def uniform_blocks(problem: Problem, blocks: Blocks, n: int) -> Template:
    """Every block runs again; n in a row of a container are one region."""
    number: dict[tuple[int, int], int] = {}
    group = [
        number.setdefault((container, rank // n), len(number))
        for container, rank in zip(blocks.container, blocks.rank, strict=True)
    ]
    region = [NO_BLOCK if block == NO_BLOCK else group[block] for block in blocks.of_op]
    return regions(problem, [part != NO_BLOCK for part in region], region)
