"""Recompute normalisations and elementwise activations; keep every matrix product.

Also called: compute-memory balanced checkpointing, with the cheapest ops recomputed.
Paper: T. Yuan, Y. Liu, X. Ye, S. Zhang, J. Tan, B. Chen, C. Song, D. Zhang, "Accelerating the
Training of Large Language Models using Efficient Activation Rematerialization and Optimal Hybrid
Parallelism", USENIX ATC 2024, https://www.usenix.org/conference/atc24/presentation/yuan.
Solves: no stated problem; the budget only decides whether recomputation is needed at all. These
ops make large values in little time. One runs again only if backward has its inputs anyway, or
if they are recomputed too. Otherwise its input would be kept in place of its result. The paper
also offloads a fraction of what is kept; this does not.
Optimal: where the step fits without recomputation. Cost: O(ops + reads).
Shortcomings: saves little where matrix products set the peak; blind to measured costs; an
activation from the user's own kernel is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.attention_core import DROPOUT, op_kind
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.templates.template import (
    Template,
    read_in_backward,
    regions,
    solve_templates,
    unavoidable,
)

NORMS = frozenset(
    {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
     "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
     "_batch_norm_with_update", "_batch_norm_with_update_functional", "cudnn_batch_norm",
     "miopen_batch_norm", "layer_norm", "group_norm", "batch_norm", "instance_norm",
     "rms_norm", "_fused_rms_norm", "pow", "square", "mean", "rsqrt"}
)  # fmt: skip
"""Norms that are one op, and the parts of a root-mean-square norm that is written out."""
ACTIVATIONS = frozenset(
    {"gelu", "relu", "relu6", "silu", "mish", "sigmoid", "tanh", "elu", "selu", "celu", "glu",
     "leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "softplus", "log_sigmoid_forward",
     "prelu", "_prelu_kernel", "threshold", "rrelu_with_noise_functional", "mul"}
)  # fmt: skip
"""Elementwise functions, and the product of a gated unit."""
FOLLOWING = frozenset({"add", "clone", "_to_copy"})
"""Recomputed if the one value that they read is: epsilon of a norm, copies, casts."""
NONE_FOUND = "no norm or activation that could be recomputed: the template does not apply"


@dataclass(frozen=True)
class NormsAndActivations:
    """Solver of one rule; `time_limit_s`, `progress` as in `remat.solver.solve`."""

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else the template, if that does."""
        search = Search.of(self, "norms_and_activations", graph, budget_bytes)
        return solve_templates(search, norms_and_activations_templates, NONE_FOUND)


def norms_and_activations_templates(problem: Problem) -> Iterator[Template]:
    """The template; none where there is no such op."""
    again = cheap_to_recompute(problem)
    if any(again):
        yield regions(problem, again, [0] * problem.n_forward)


def cheap_to_recompute(problem: Problem) -> list[bool]:
    """Whether each forward op is a norm or an activation whose inputs backward has anyway."""
    at_hand = unavoidable(problem)
    for v in read_in_backward(problem):
        at_hand[v] = 1
    again: list[bool] = []
    for op in range(problem.n_forward):
        kind = op_kind(problem.graph.ops[op].target)
        reads = problem.inputs[op]
        sources = [problem.producer[v] for v in reads]
        is_named = kind in NORMS or kind in ACTIVATIONS or kind in DROPOUT
        if kind in FOLLOWING:
            is_named = len(sources) == 1 and again[sources[0]]
        there = all(at_hand[v] for v in reads)
        again.append(is_named and there and not problem.pinned[op])
        for v in problem.outputs[op] if again[-1] else ():
            at_hand[v] = 1
    return again
