"""The attention cores of a graph, found by the ATen names of its ops.

A core is a fused attention op, or, where attention is written out, a softmax with the
batched product of queries and keys before it, that of weights and values after it, and the
scaling, masks, casts and dropout between them. Products by `mm` and `addmm` are linear layers.
A softmax written as exp and sum is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remat.solver.problem import Problem

NO_CORE = -1
SOFTMAX = frozenset({"_softmax", "_safe_softmax", "_masked_softmax", "softmax"})
BATCHED_PRODUCT = frozenset({"bmm", "baddbmm", "matmul"})
FUSED = frozenset(
    {"_flash_attention_forward", "_efficient_attention_forward", "_flash_attn_forward",
     "_flash_attn_varlen_forward", "efficient_attention_forward_cutlass"}
)  # fmt: skip
DROPOUT = frozenset({"native_dropout", "dropout"})
COPY = frozenset({"clone", "_to_copy", "contiguous"})
SCALE_AND_MASK = frozenset(
    {"add", "sub", "rsub", "mul", "div", "neg", "masked_fill", "where", "tril", "triu", "tanh",
     "ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "scalar_tensor", "arange",
     "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or",
     "bitwise_not", "bitwise_and", "bitwise_or"}
)  # fmt: skip
BEFORE_SOFTMAX = SCALE_AND_MASK | COPY
AFTER_SOFTMAX = DROPOUT | COPY | {"mul", "div", "masked_fill", "where"}
NO_ATTENTION = (
    "no attention found: the template does not apply. It looks for scaled_dot_product ops and "
    "for a softmax between two batched matrix products"
)


def op_kind(target: str) -> str:
    """The op's name without namespace and overload: ``mm`` of ``aten.mm.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def is_fused_attention(kind: str) -> bool:
    """Whether an op of that name computes attention by itself."""
    return "scaled_dot_product" in kind or kind in FUSED


def attention_cores(problem: Problem) -> list[int]:
    """The core of each forward op, numbered in captured order; `NO_CORE` outside."""
    kinds = [op_kind(op.target) for op in problem.graph.ops[: problem.n_forward]]
    readers = _forward_readers(problem)
    core = [NO_CORE] * problem.n_forward
    found = 0
    for op, kind in enumerate(kinds):
        members: Iterable[int] = ()
        if is_fused_attention(kind):
            members = (op,)
        elif kind in SOFTMAX:
            members = _around_softmax(problem, kinds, readers, op)
        fresh = [member for member in members if core[member] == NO_CORE]
        for member in fresh:
            core[member] = found
        found += bool(fresh)
    return core


def _forward_readers(problem: Problem) -> list[list[int]]:
    """For each forward op the forward ops that read what it makes."""
    readers: list[list[int]] = [[] for _ in range(problem.n_forward)]
    for op in range(problem.n_forward):
        for v in problem.inputs[op]:
            readers[problem.producer[v]].append(op)
    return readers


def _around_softmax(
    problem: Problem, kinds: list[str], readers: list[list[int]], softmax: int
) -> list[int]:
    """Both batched products of a softmax and what lies between; empty if one is missing."""
    before = _walk(
        softmax, lambda op: [problem.producer[v] for v in problem.inputs[op]], kinds, BEFORE_SOFTMAX
    )
    after = _walk(softmax, lambda op: readers[op], kinds, AFTER_SOFTMAX)
    if not _has_product(before, kinds) or not _has_product(after, kinds):
        return []
    return [*before, softmax, *after]


def _has_product(ops: Iterable[int], kinds: list[str]) -> bool:
    return any(kinds[op] in BATCHED_PRODUCT for op in ops)


def _walk(
    start: int, near: Callable[[int], list[int]], kinds: list[str], through: frozenset[str]
) -> list[int]:
    """Ops reached from `start` over ops of the kinds `through`, up to batched products."""
    reached: dict[int, None] = {}
    stack = [start]
    while stack:
        for op in near(stack.pop()):
            if op not in reached and kinds[op] in through | BATCHED_PRODUCT:
                reached[op] = None
                if kinds[op] in through:
                    stack.append(op)
    return list(reached)
