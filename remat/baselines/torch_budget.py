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
knapsacks. Unlike torch: runtimes are the graph's costs, not FLOPs; f is a share of what the
unmodified step saves, not of a first cut; the cut of the cheap ops alone is not tried; views are
no nodes; random states are saved and put back, where torch draws anew.
Optimal: where the step fits without recomputation; in saved bytes and per op, not in the peak.
Cost: one maximum flow for each f, and 10,000 times as many steps as items for method ``dp``.
Shortcomings: blind to the peak, to workspaces, and to the chains that a recomputation needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from ortools.graph.python import max_flow

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.backends.mip import Limits, MixedProgram, solve_program
from remat.solver.policies import template
from remat.solver.problem import Problem
from remat.solver.recompute_summary import DROPOUT_OPS, is_fused_attention, op_kind
from remat.solver.search import Listener, Search

# torch/_functorch/_activation_checkpointing/knapsack.py; tests compare the results of each method
# with torch's.
_SCALE = 10_000  # steps into which ``dp`` divides a unit of memory; torch has as many
_RELATIVE_GAP = 1e-4


class KnapsackTable:
    """Dynamic program over quantised memory (``dp``), for any limit up to `max_memory`.

    As of each knapsack here, a choice is the indices of the items that are saved.
    """

    def __init__(
        self, memory: Sequence[float], runtime: Sequence[float], max_memory: float
    ) -> None:
        capacity = round(max_memory * _SCALE)
        # Rounded, so a choice may exceed the limit by one ten-thousandth for each item.
        self.weight = [round(size * _SCALE) for size in memory]
        self.taken: list[npt.NDArray[np.bool_]] = []
        best = np.zeros(capacity + 1, np.float32)
        for weight, time in zip(self.weight, runtime, strict=True):
            with_item = np.zeros_like(best)
            if weight <= capacity:
                # Single precision, as in torch.
                with_item[weight:] = best[: capacity + 1 - weight] + np.float32(time)
            # Strictly more: on ties, earlier items win, as in torch.
            self.taken.append(with_item > best)
            best = np.maximum(best, with_item)

    def choose(self, max_memory: float) -> list[int]:
        left = round(max_memory * _SCALE)
        saved: list[int] = []
        # From the last item back, as row i knows the best of the items before it.
        for item in reversed(range(len(self.weight))):
            if self.taken[item][left]:
                saved.append(item)
                left -= self.weight[item]
        return saved[::-1]


def greedy_knapsack(
    memory: Sequence[float], runtime: Sequence[float], max_memory: float
) -> list[int]:
    # Items without memory come first.
    ratio = [time / size if size else math.inf for size, time in zip(memory, runtime, strict=True)]
    saved: list[int] = []
    used = 0.0
    for item in sorted(range(len(ratio)), key=lambda item: -ratio[item]):
        if used + memory[item] <= max_memory:
            used += memory[item]
            saved.append(item)
    return saved


def ilp_knapsack(
    memory: Sequence[float], runtime: Sequence[float], max_memory: float, time_limit_s: float = 60.0
) -> list[int]:
    """The best items to one part in 10,000, by integer programming; none if time runs out."""
    program = MixedProgram()
    items = [program.variable(-time, integer=True) for time in runtime]
    program.row([(i, size) for i, size in zip(items, memory, strict=True)], upper=max_memory)
    limits = Limits(time_limit_s=time_limit_s, relative_gap=_RELATIVE_GAP)
    values = solve_program(program, limits).values if items else None
    return [i for i in items if values is not None and values[i] > 0.5]


# torch's partition of joint graphs (torch/_functorch/partitioners.py), a minimum cut between what
# forward makes and what backward reads: each value is an arc whose capacity is its bytes.


_SOURCE, _SINK = 0, 1


def cheapest_saved(problem: Problem, banned: Collection[int]) -> list[int]:
    """Values of least total bytes from which all that backward reads can be made."""
    flow = cast(Any, max_flow.SimpleMaxFlow())
    # Larger than any cut, so such arcs are never cut.
    unlimited = sum(problem.size_bytes) + 1
    for v, op in enumerate(problem.producer):
        if op < problem.n_forward:
            size_bytes = 0 if v in problem.held else problem.size_bytes[v]  # held by the caller
            flow.add_arc_with_capacity(_cut_made(v), _cut_at_hand(v), size_bytes)
    for op in range(problem.n_forward):
        fixed = problem.no_recompute[op] or op in banned
        # An op that may rerun links its inputs to its outputs; outputs of others come from the
        # source.
        sources = [_SOURCE] if fixed else [_cut_at_hand(v) for v in problem.inputs[op]]
        for v in problem.outputs[op]:
            for source in sources:
                flow.add_arc_with_capacity(source, _cut_made(v), unlimited)
    for v in template.read_in_backward(problem):
        flow.add_arc_with_capacity(_cut_at_hand(v), _SINK, unlimited)
    if flow.num_arcs() == 0:
        return []
    flow.solve(_SOURCE, _SINK)
    # Of several minimum cuts, the one nearest to backward recomputes least.
    beyond = set(cast("list[int]", flow.get_sink_side_min_cut()))
    forward = (v for v, op in enumerate(problem.producer) if op < problem.n_forward)
    return [v for v in forward if _cut_made(v) not in beyond and _cut_at_hand(v) in beyond]


def _template_kept(problem: Problem, saved: Collection[int]) -> bytearray:
    kept = template.unavoidable(problem)
    for v in saved:
        kept[v] = 1
    return kept


def _cut_made(v: int) -> int:
    return 2 * v + 2  # 0 and 1 are source and sink


def _cut_at_hand(v: int) -> int:
    return 2 * v + 3


_METHODS = ("dp", "greedy", "ilp")
_COMPUTE_INTENSIVE = frozenset(
    {"mm", "convolution", "bmm", "addmm", "upsample_bilinear2d", "_scaled_mm"}
)
_RANDOM = DROPOUT_OPS | {"rand_like", "randn_like"}
_REDUCTION = 4  # an op whose inputs are more than so many times its outputs is not to run again
_NOTHING_SAVED = "the step saves nothing for backward that could be recomputed"


@dataclass(frozen=True)
class TorchKnapsack:
    """Solver with torch's knapsacks.

    Attributes
    ----------
    method : ``dp`` (torch's default), ``greedy`` or ``ilp``.
    steps : fractions tried, 0 and 1 included.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    method: str = "dp"
    steps: int = 17
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        template.check_choice("method", self.method, _METHODS)
        if self.steps < 2:
            raise SolverError(f"steps must be 2 (all and nothing) or more, not {self.steps}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "torch_knapsack", graph, budget_bytes)
        return template.solve_templates(search, self.templates, _NOTHING_SAVED)

    def templates(self, problem: Problem) -> Iterator[template.Template]:
        if store_all_saved_bytes(problem) == 0:
            return
        partition = Partition(problem, self.method, self.time_limit_s / self.steps)
        seen: set[bytes] = set()
        # Fraction 1 is the unmodified step, which has been tried.
        for i in reversed(range(self.steps - 1)):
            kept = partition.kept(i / (self.steps - 1))
            if bytes(kept) not in seen:
                seen.add(bytes(kept))
                yield template.Template(kept, just_in_time=True)


class Partition:
    def __init__(self, problem: Problem, method: str = "dp", time_limit_s: float = 60.0) -> None:
        self.problem, self.method, self.time_limit_s = problem, method, time_limit_s
        self.total_bytes = store_all_saved_bytes(problem)
        # Largest first, as in torch: the order breaks ties in `dp`.
        by_bytes = problem.output_bytes.__getitem__
        self.items = sorted(banned_ops(problem), key=by_bytes, reverse=True)
        self.memory = [problem.output_bytes[op] / self.total_bytes for op in self.items]
        self.runtime = [problem.cost_us[op] for op in self.items]
        self.frugal = cheapest_saved(problem, frozenset(self.items))
        self.table = KnapsackTable(self.memory, self.runtime, 1.0) if method == "dp" else None

    def kept(self, fraction: float) -> bytearray:
        # Values that every template keeps do not count.
        fixed = template.unavoidable(self.problem)
        size_bytes = sum(self.problem.size_bytes[v] for v in self.frugal if not fixed[v])
        # The first cut already fits the fraction, so no dear op reruns.
        if size_bytes <= fraction * self.total_bytes:
            return _template_kept(self.problem, self.frugal)
        banned = frozenset(self.items[i] for i in self.choose(fraction))
        return _template_kept(self.problem, cheapest_saved(self.problem, banned))

    def choose(self, fraction: float) -> list[int]:
        if self.table is not None:
            return self.table.choose(fraction)
        if self.method == "greedy":
            return greedy_knapsack(self.memory, self.runtime, fraction)
        return ilp_knapsack(self.memory, self.runtime, fraction, self.time_limit_s)


def store_all_saved_bytes(problem: Problem) -> int:
    fixed = template.unavoidable(problem)
    return sum(problem.size_bytes[v] for v in template.read_in_backward(problem) if not fixed[v])


def banned_ops(problem: Problem) -> list[int]:
    """Forward ops that backward depends on and that torch does not run again for free."""
    wanted = bytearray(problem.n_ops)
    for v in template.read_in_backward(problem):
        wanted[problem.producer[v]] = 1
    for op in reversed(range(problem.n_forward)):
        for v in problem.inputs[op] if wanted[op] else ():
            wanted[problem.producer[v]] = 1
    ops = problem.graph.ops
    return [
        op
        for op in range(problem.n_forward)
        if wanted[op] and not problem.no_recompute[op] and _is_dear(problem.graph, ops[op])
    ]


def _is_dear(graph: TrainingGraph, op: Op) -> bool:
    kind = op_kind(op.target)
    if kind in _COMPUTE_INTENSIVE or kind in _RANDOM or is_fused_attention(kind):
        return True
    values = graph.value_by_name
    read_bytes = sum(values[name].size_bytes for name in op.inputs)
    return sum(values[name].size_bytes for name in op.outputs) * _REDUCTION < read_bytes
