"""The partition that PyTorch's `activation_memory_budget` makes, for comparison.

Also called: automatic activation checkpointing of `torch.compile`, memory budget API.
Source: torch/_functorch/partitioners.py of PyTorch 2.4 (2024) and later, pull request
https://github.com/pytorch/pytorch/pull/126320.
Solves: a 0/1 knapsack on saved bytes. Ops that are dear (matrix products, convolutions, attention),
draw randomly or reduce fourfold are not to run again; a minimum cut saves the fewest bytes
from which the others make the rest. That may be more than a fraction f of what the unmodified
step saves. Then a knapsack picks the dear ops of most runtime whose results are within f of it,
the others may run again, and the cut is made anew. Each op runs again at most once, when
backward first needs it. f is tried in equal steps. The fastest schedule whose true peak fits is
taken.
As in torch: the lists of ops, sizes over all results of an op, the order of items, the cut, the
knapsacks. Unlike torch: runtimes are the graph's prices, not FLOPs; f is a share of what the
unmodified step saves, not of a first cut; the cut of the cheap ops alone is not tried; views are
no nodes; random states are saved and put back, where torch draws anew.
Optimal: where the step fits without recomputation; in saved bytes and per op, not in the peak.
Cost: one maximum flow for each f, and 10,000 times as many steps as items for method ``dp``.
Shortcomings: blind to the peak, to workspaces, and to the chains that a recomputation needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Op, TrainingGraph
from remat.solver.attention_core import DROPOUT, is_fused_attention, op_kind
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.templates.knapsack import KnapsackTable, Selection, greedy_knapsack, ilp_knapsack
from remat.solver.templates.min_cut import cheapest_saved, template_kept
from remat.solver.templates.template import (
    Template,
    check_choice,
    read_in_backward,
    solve_templates,
    unavoidable,
)

METHODS = ("dp", "greedy", "ilp")
COMPUTE_INTENSIVE = frozenset(
    {"mm", "convolution", "bmm", "addmm", "upsample_bilinear2d", "_scaled_mm"}
)
RANDOM = DROPOUT | {"rand_like", "randn_like"}
REDUCTION = 4
"""An op whose inputs are more than so many times its outputs is not to run again."""
NOTHING_SAVED = "the step saves nothing for backward that could be made again"


@dataclass(frozen=True)
class TorchKnapsack:
    """Solver with torch's knapsacks.

    Attributes
    ----------
    method : ``dp`` (torch's default), ``greedy`` or ``ilp``.
    steps : fractions tried, 0 and 1 included.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    method: str = "dp"
    steps: int = 17
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        if self.steps < 2:
            raise SolverError(f"steps must be 2 (all and nothing) or more, not {self.steps}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else the fastest fraction that does."""
        search = Search.of(self, "torch_knapsack", graph, budget_bytes)
        return solve_templates(search, self.templates, NOTHING_SAVED)

    def templates(self, problem: Problem) -> Iterator[Template]:
        """One template for each different choice of what to save, from more to less."""
        if store_all_saved_bytes(problem) == 0:
            return
        partition = Partition(problem, self.method, self.time_limit_s / self.steps)
        seen: set[bytes] = set()
        for i in reversed(range(self.steps - 1)):
            kept = partition.kept(i / (self.steps - 1))
            if bytes(kept) not in seen:
                seen.add(bytes(kept))
                yield Template(kept, just_in_time=True)


class Partition:
    """What to save for each of several fractions; `time_limit_s` is for one integer program."""

    def __init__(self, problem: Problem, method: str = "dp", time_limit_s: float = 60.0) -> None:
        self.problem, self.method, self.time_limit_s = problem, method, time_limit_s
        self.total_bytes = store_all_saved_bytes(problem)
        self.items = sorted(
            banned_ops(problem), key=lambda op: problem.output_bytes[op], reverse=True
        )
        self.memory = [problem.output_bytes[op] / self.total_bytes for op in self.items]
        self.runtime = [problem.cost_us[op] for op in self.items]
        self.frugal = cheapest_saved(problem, frozenset(self.items))
        self.table = KnapsackTable(self.memory, self.runtime, 1.0) if method == "dp" else None

    def kept(self, fraction: float) -> bytearray:
        """Values kept where at most `fraction` of what the unmodified step saves is saved."""
        size_bytes = sum(self.problem.size_bytes[v] for v in self._avoidable(self.frugal))
        if size_bytes <= fraction * self.total_bytes:
            return template_kept(self.problem, self.frugal)
        banned = frozenset(self.items[i] for i in self.choose(fraction).saved)
        return template_kept(self.problem, cheapest_saved(self.problem, banned))

    def choose(self, fraction: float) -> Selection:
        """The knapsack's choice among `items`."""
        if self.table is not None:
            return self.table.choose(fraction)
        if self.method == "greedy":
            return greedy_knapsack(self.memory, self.runtime, fraction)
        return ilp_knapsack(self.memory, self.runtime, fraction, self.time_limit_s)

    def _avoidable(self, values: Sequence[int]) -> list[int]:
        fixed = unavoidable(self.problem)
        return [v for v in values if not fixed[v]]


def store_all_saved_bytes(problem: Problem) -> int:
    """Bytes that the unmodified step saves for backward and that could be made again."""
    fixed = unavoidable(problem)
    return sum(problem.size_bytes[v] for v in read_in_backward(problem) if not fixed[v])


def banned_ops(problem: Problem) -> list[int]:
    """Forward ops that backward depends on and that torch does not run again for free."""
    wanted = bytearray(problem.n_ops)
    for v in read_in_backward(problem):
        wanted[problem.producer[v]] = 1
    for op in reversed(range(problem.n_forward)):
        for v in problem.inputs[op] if wanted[op] else ():
            wanted[problem.producer[v]] = 1
    ops = problem.graph.ops
    return [
        op
        for op in range(problem.n_forward)
        if wanted[op] and not problem.pinned[op] and _is_dear(problem.graph, ops[op])
    ]


def _is_dear(graph: TrainingGraph, op: Op) -> bool:
    kind = op_kind(op.target)
    if kind in COMPUTE_INTENSIVE or kind in RANDOM or is_fused_attention(kind):
        return True
    values = graph.value_by_name
    read_bytes = sum(values[name].size_bytes for name in op.inputs)
    return sum(values[name].size_bytes for name in op.outputs) * REDUCTION < read_bytes
