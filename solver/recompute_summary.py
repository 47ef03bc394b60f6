"""What a schedule keeps of what backward reads, and what it computes again, by kind of op.

Attention is counted apart, by cores: its output is kept if the op that makes it runs once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.outcome import Attention
from remat.schedules.schedule import Schedule
from remat.solver.problem import Problem, inverted

# A core, found by ATen names, is a fused attention op, or a softmax with the batched products
# before and after it and what lies between. Products by `mm` and `addmm` are linear layers. A
# softmax written as exp and sum is not seen.

NO_CORE = -1
_SOFTMAX = frozenset({"_softmax", "_safe_softmax", "_masked_softmax", "softmax"})
_BATCHED_PRODUCT = frozenset({"bmm", "baddbmm", "matmul"})
_FUSED = frozenset(
    {"_flash_attention_forward", "_efficient_attention_forward", "_flash_attn_forward",
     "_flash_attn_varlen_forward", "efficient_attention_forward_cutlass"}
)  # fmt: skip
DROPOUT_OPS = frozenset({"native_dropout", "dropout"})
_COPY = frozenset({"clone", "_to_copy", "contiguous"})
_SCALE_AND_MASK = frozenset(
    {"add", "sub", "rsub", "mul", "div", "neg", "masked_fill", "where", "tril", "triu", "tanh",
     "ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "scalar_tensor", "arange",
     "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or",
     "bitwise_not", "bitwise_and", "bitwise_or"}
)  # fmt: skip
_BEFORE_SOFTMAX = _SCALE_AND_MASK | _COPY
_AFTER_SOFTMAX = DROPOUT_OPS | _COPY | {"mul", "div", "masked_fill", "where"}
NO_ATTENTION = (
    "no attention found: the template does not apply. It looks for scaled_dot_product ops, and "
    "for a softmax between two batched matrix products"
)


def op_kind(target: str) -> str:
    """The op's name without namespace and overload: ``mm`` of ``aten.mm.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "_convolution",
     "cudnn_convolution", "convolution_overrideable", "_slow_conv2d_forward",
     "convolution_backward"}
)  # fmt: skip
"""With attention, those whose floating-point operations torch counts
(torch/utils/flop_counter.py)."""


def is_product(target: str) -> bool:
    kind = op_kind(target)
    return kind in _PRODUCTS or "attention" in kind


def is_fused_attention(kind: str) -> bool:
    return "scaled_dot_product" in kind or kind in _FUSED


def attention_cores(problem: Problem) -> list[int]:
    """The core of each forward op, numbered in captured order; `NO_CORE` outside."""
    kinds = [op_kind(op.target) for op in problem.graph.ops[: problem.n_forward]]
    sources = [[problem.producer[v] for v in problem.inputs[op]] for op in range(problem.n_forward)]
    readers = inverted(sources, problem.n_forward)
    core = [NO_CORE] * problem.n_forward
    found = 0
    for op, kind in enumerate(kinds):
        members: Iterable[int] = ()
        if is_fused_attention(kind):
            members = (op,)
        elif kind in _SOFTMAX:
            before = _walk(op, sources, kinds, _BEFORE_SOFTMAX)
            after = _walk(op, readers, kinds, _AFTER_SOFTMAX)
            # Both batched products and what lies between; nothing if one is missing.
            products = [sum(kinds[i] in _BATCHED_PRODUCT for i in ops) for ops in (before, after)]
            members = (*before, op, *after) if all(products) else ()
        # An op is of the first core that reaches it.
        fresh = [member for member in members if core[member] == NO_CORE]
        for member in fresh:
            core[member] = found
        found += bool(fresh)
    return core


def _walk(root: int, near: list[list[int]], kinds: list[str], through: frozenset[str]) -> list[int]:
    """Ops reached from `root` over ops of the kinds `through`, up to batched products."""
    reached: dict[int, None] = {}
    stack = [root]
    while stack:
        for op in near[stack.pop()]:
            if op not in reached and kinds[op] in through | _BATCHED_PRODUCT:
                reached[op] = None
                if kinds[op] in through:
                    stack.append(op)
    return list(reached)


class OpKind(NamedTuple):
    """Forward ops of one kind that backward reads from, or that run again."""

    kind: str
    ops: int
    recomputed: int
    recomputed_us: float  # of the further runs


def attention_of(graph: TrainingGraph, schedule: Schedule) -> Attention | None:
    """What `schedule` does with attention; None without attention or recomputation."""
    graph = graph_of_schedule(graph, schedule)
    runs = schedule.computations()
    if all(count == 1 for count in runs.values()):
        return None
    makers = attention_outputs(graph)
    recomputed = sum(runs[graph.ops[op].name] > 1 for op in makers)
    return Attention(len(makers), recomputed) if makers else None


def attention_outputs(graph: TrainingGraph) -> list[int]:
    """The op that makes the output of each attention from which backward reads."""
    problem = Problem.of(graph)
    read = _read_by_backward(problem)
    makers, needed = dict[int, int](), set[int]()
    for op, core in enumerate(attention_cores(problem)):
        kind = op_kind(graph.ops[op].target)
        if core == NO_CORE:
            continue
        if kind in _BATCHED_PRODUCT or is_fused_attention(kind):
            makers[core] = op  # the product of weights and values makes the output
        if op in read:
            needed.add(core)
    return [op for core, op in makers.items() if core in needed]


def kinds_of(graph: TrainingGraph, schedule: Schedule) -> tuple[OpKind, ...]:
    """Each kind of forward op that counts, most time of further runs first."""
    graph = graph_of_schedule(graph, schedule)
    runs = schedule.computations()
    read = _read_by_backward(Problem.of(graph))
    found: dict[str, OpKind] = {}
    for i, op in enumerate(graph.ops[: graph.n_forward]):
        again = runs[op.name] - 1
        if i in read or again > 0:
            kind = op_kind(op.target)
            old = found.get(kind, OpKind(kind, 0, 0, 0.0))
            spent_us = old.recomputed_us + again * op.cost_us
            found[kind] = OpKind(kind, old.ops + 1, old.recomputed + (again > 0), spent_us)
    return tuple(sorted(found.values(), key=lambda kind: (-kind.recomputed_us, kind.kind)))


def kinds_text(kinds: tuple[OpKind, ...], most: int = 4) -> str:
    """``gelu 12 of 12, add 3 of 24``: those that cost most to run again, then the rest."""
    again = [kind for kind in kinds if kind.recomputed]
    parts = [f"{kind.kind} {kind.recomputed} of {kind.ops}" for kind in again[:most]]
    rest = sum(kind.recomputed for kind in again[most:])
    return ", ".join([*parts, f"{rest} others"] if rest else parts)


def _read_by_backward(problem: Problem) -> set[int]:
    reads = problem.inputs[problem.n_forward :]
    makers = {problem.producer[v] for values in reads for v in values}
    return {op for op in makers if op < problem.n_forward}
