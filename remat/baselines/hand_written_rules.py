"""Rules written by hand for blocks, attention and segments, each tried against any budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.policies import template
from remat.solver.problem import Problem
from remat.solver.recompute_summary import (
    DROPOUT_OPS,
    NO_ATTENTION,
    NO_CORE,
    attention_cores,
    op_kind,
)
from remat.solver.search import Listener, Search, check_least
from remat.solver.segments.chen_sqrt import articulation_points, checkpointed_state, kept_values
from remat.solver.state import store_all_state


@dataclass(frozen=True)
class Full:
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

    `time_limit_s` and `progress` are those of `solve`.
    """

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "full", graph, budget_bytes)
        return template.solve_templates(search, _full_templates, template.NO_REPEATED_BLOCK)


def _full_templates(problem: Problem) -> Iterator[template.Template]:
    blocks = template.module_blocks(problem.graph)
    if blocks.names:
        # One region a block, so that each block reruns when backward reaches it.
        yield template.regions(
            problem, [block != template.NO_BLOCK for block in blocks.of_op], blocks.of_op
        )


@dataclass(frozen=True)
class Selective:
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

    `time_limit_s` and `progress` are those of `solve`.
    """

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "selective", graph, budget_bytes)
        return template.solve_templates(search, _selective_templates, NO_ATTENTION)


def _selective_templates(problem: Problem) -> Iterator[template.Template]:
    core = attention_cores(problem)
    again = [part != NO_CORE for part in core]
    if any(again):
        # One region an attention, so that they rerun one at a time.
        yield template.regions(problem, again, core)


@dataclass(frozen=True)
class KeepAttentionOutput:
    """Recompute every block but for its attention, whose output is kept.

    Also called: rematerialization-aware gradient checkpointing; checkpoint at the attention
    output.
    Paper: D. Li, R. Shao, A. Xie, E. P. Xing, X. Ma, I. Stoica, J. E. Gonzalez, H. Zhang,
    "DISTFLASHATTN: Distributed Memory-efficient Attention for Long-context LLMs Training", 2023,
    https://arxiv.org/abs/2310.03294.
    Solves: no stated problem; the budget only decides whether recomputation is needed at all.
    Forward keeps what enters a block and what attention gives its backward: the output, the
    log-sum-exp, states of the generator. Attention runs once. The part after it and the part
    before it run again, each when backward reaches it. The paper joins the part after one
    attention with the part before the next; what is kept is the same.
    Optimal: where the step fits without recomputation. Cost: O(ops + reads).
    Shortcomings: attention that is not fused keeps its weights, which are large; keeps nothing of
    the rest even where it would fit; applies only where blocks repeat and attention is found.

    `time_limit_s` and `progress` are those of `solve`.
    """

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "keep_attention_output", graph, budget_bytes)
        absent = NO_ATTENTION if template.module_blocks(graph).names else template.NO_REPEATED_BLOCK
        return template.solve_templates(search, _keep_attention_output_templates, absent)


def _keep_attention_output_templates(problem: Problem) -> Iterator[template.Template]:
    blocks = template.module_blocks(problem.graph).of_op
    core = attention_cores(problem)
    ops = range(problem.n_forward)
    if any(blocks[op] != template.NO_BLOCK and core[op] != NO_CORE for op in ops):
        again = [blocks[op] != template.NO_BLOCK and core[op] == NO_CORE for op in ops]
        # One region a block, on both sides of its attention.
        yield template.regions(problem, again, blocks)


_NORMS = frozenset(
    {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
     "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
     "_batch_norm_with_update", "_batch_norm_with_update_functional", "cudnn_batch_norm",
     "miopen_batch_norm", "layer_norm", "group_norm", "batch_norm", "instance_norm",
     "rms_norm", "_fused_rms_norm", "pow", "square", "mean", "rsqrt"}
)  # fmt: skip
"""Norms that are one op, and the parts of a root-mean-square norm that is written out."""
_ACTIVATIONS = frozenset(
    {"gelu", "relu", "relu6", "silu", "mish", "sigmoid", "tanh", "elu", "selu", "celu", "glu",
     "leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "softplus", "log_sigmoid_forward",
     "prelu", "_prelu_kernel", "threshold", "rrelu_with_noise_functional", "mul"}
)  # fmt: skip
"""Elementwise functions, and the product of a gated unit."""
_FOLLOWING = frozenset({"add", "clone", "_to_copy"})
"""Recomputed if the one value that they read is: epsilon of a norm, copies, casts."""
_NONE_FOUND = "no norm or activation that could be recomputed: the template does not apply"


@dataclass(frozen=True)
class NormsAndActivations:
    """Recompute normalisations and elementwise activations; keep every matrix product.

    Also called: compute-memory balanced checkpointing, with the cheapest ops recomputed.
    Paper: T. Yuan, Y. Liu, X. Ye, S. Zhang, J. Tan, B. Chen, C. Song, D. Zhang, "Accelerating the
    Training of Large Language Models using Efficient Activation Rematerialization and Optimal
    Hybrid Parallelism", USENIX ATC 2024,
    https://www.usenix.org/conference/atc24/presentation/yuan.
    Solves: no stated problem; the budget only decides whether recomputation is needed at all.
    These ops make large values in little time. One runs again only if backward has its inputs
    anyway, or if they are recomputed too. Otherwise its input would be kept in place of its
    result. The paper also offloads a fraction of what is kept; this does not.
    Optimal: where the step fits without recomputation. Cost: O(ops + reads).
    Shortcomings: saves little where matrix products set the peak; blind to measured costs; an
    activation from the user's own kernel is not seen.

    `time_limit_s` and `progress` are those of `solve`.
    """

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "norms_and_activations", graph, budget_bytes)
        return template.solve_templates(search, _norms_and_activations_templates, _NONE_FOUND)


def _norms_and_activations_templates(problem: Problem) -> Iterator[template.Template]:
    again = _cheap_to_recompute(problem)
    if any(again):
        # One region, so that values passed between these ops are not kept.
        yield template.regions(problem, again, [0] * problem.n_forward)


def _cheap_to_recompute(problem: Problem) -> list[bool]:
    # An op reruns only if its inputs are kept anyway or rerun too: else keeping the input would
    # replace keeping the output.
    at_hand = template.unavoidable(problem)
    for v in template.read_in_backward(problem):
        at_hand[v] = 1
    again: list[bool] = []
    for op in range(problem.n_forward):
        kind = op_kind(problem.graph.ops[op].target)
        reads = problem.inputs[op]
        sources = [problem.producer[v] for v in reads]
        is_named = kind in _NORMS or kind in _ACTIVATIONS or kind in DROPOUT_OPS
        # Casts, copies and the addition of an epsilon rerun with the op before them.
        if kind in _FOLLOWING:
            is_named = len(sources) == 1 and again[sources[0]]
        there = all(at_hand[v] for v in reads)
        again.append(is_named and there and not problem.no_recompute[op])
        for v in problem.outputs[op] if again[-1] else ():
            at_hand[v] = 1
    return again


_POINTS = ("auto", "articulation", "all")


@dataclass(frozen=True)
class ChenGreedy:
    """Checkpoints wherever a segment of forward has grown beyond so many bytes.

    Also called: Chen's greedy, memory-budget segmenting; "linearised" or "AP greedy" in Checkmate.
    Paper: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory
    Cost", 2016, https://arxiv.org/abs/1604.06174; its search over the bytes of a segment as P.
    Jain et al. reproduce it, "Checkmate", 2020, https://arxiv.org/abs/1910.02653.
    Solves: no stated problem. Forward is walked once; where the bytes made since the last
    checkpoint exceed b, the next place that may hold one ends the segment. What crosses is kept,
    a segment is recomputed when backward first reads it. Of all b tried, and of keeping
    everything, the fastest schedule that fits is returned.
    Optimal up to a constant on uniform chains. Cost: O(ops + reads) for each b.
    Shortcomings: one b for all segments; recomputes what would have fitted; blind to op costs;
    where skips cross, every place makes large checkpoints.

    Attributes
    ----------
    points : where a checkpoint may be: at the articulation points of forward, after all its
        ops, or ``auto``: the former where there are any. sizes : how many b are tried.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    points: str = "auto"
    sizes: int = 20
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        template.check_choice("points", self.points, _POINTS)
        check_least(1, sizes=self.sizes)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        return Search.of(self, "chen_greedy", graph, budget_bytes).result_of(self._run)

    def _run(self, search: Search) -> None:
        problem = search.problem
        if search.offer_least(store_all_state(problem)):
            return
        places = self._places(problem)
        if not places:
            search.message = "the forward graph has no articulation point; try points='all'"
        tried: set[tuple[int, ...]] = set()
        for size_bytes in _segment_sizes(problem, self.sizes):
            ends = _greedy_ends(problem, places, size_bytes)
            # No segment can end if there is no place.
            if not places or search.out_of_time():
                return
            # Many sizes give the same segments.
            if ends not in tried:
                tried.add(ends)
                search.say(f"segments of {size_bytes} bytes")
                search.offer_least(checkpointed_state(problem, ends))

    def _places(self, problem: Problem) -> list[int]:
        everywhere = list(range(problem.n_forward - 1))  # forward ends after the last op anyway
        if self.points == "all":
            return everywhere
        found = [place.end for place in articulation_points(problem, kept_values(problem))]
        return found or (everywhere if self.points == "auto" else [])


def _segment_sizes(problem: Problem, count: int) -> list[int]:
    """The b to try, from the mean bytes of an op up to those of all, in equal ratios."""
    most = max(sum(problem.output_bytes[: problem.n_forward]), 1)
    least = max(most // max(problem.n_forward, 1), 1)
    ratio = (most / least) ** (1 / count)
    sizes = [round(least * ratio**i) for i in range(count)]
    middle = math.log(most / least) / 2
    return sorted(dict.fromkeys(sizes), key=lambda size: abs(math.log(size / least) - middle))


def _greedy_ends(problem: Problem, places: Iterable[int], size_bytes: int) -> tuple[int, ...]:
    ends: list[int] = []
    allowed, since_bytes = set(places), 0
    for op in range(problem.n_forward):
        since_bytes += problem.output_bytes[op]
        if since_bytes > size_bytes and op in allowed:
            ends.append(op)
            since_bytes = 0
    return tuple(ends)
