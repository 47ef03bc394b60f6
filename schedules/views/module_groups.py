"""Groups of modules that a picture has room for: by layer, or by place in any layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.graph_capture.graph import TrainingGraph

OUTSIDE = "(outside modules)"
FEW, MANY = 4, 150
"""With fewer rows than `FEW` a picture says little. More than `MANY` cannot be told apart."""


def layer_of(module: str) -> str:
    """The path up to its first index: ``blocks.3`` of ``blocks.3.attn.qkv``."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return module or OUTSIDE


def place_of(module: str) -> str:
    """The place in any layer: ``blocks.*.attn`` of ``blocks.3.attn.qkv``."""
    parts = ["*" if part.isdigit() else part for part in module.split(".")]
    end = parts.index("*") + 2 if "*" in parts else len(parts)
    return ".".join(parts[:end]) or OUTSIDE


def rows_of_ops(graph: TrainingGraph) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Titles of rows in captured order, and the row of each op.

    A row is a layer. If that gives too few rows, it is a module; if that does too, a forward op.
    If there are too many rows, neighbours are merged.
    """

    def module(i: int) -> str:
        return graph.ops[i].module

    ways: tuple[Callable[[int], str], ...] = (
        lambda i: layer_of(module(i)),
        lambda i: module(i) or OUTSIDE,
    )
    for way in ways:
        names = [way(i) for i in range(len(graph.ops))]
        titles = list(dict.fromkeys(names))
        if len(titles) >= FEW:
            return _merged(titles, [titles.index(name) for name in names])
    return _by_forward_op(graph)


def _by_forward_op(graph: TrainingGraph) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """One row a forward op. An op of backward is in the row of a forward value that it reads."""
    producer = {v: i for i, op in enumerate(graph.ops[: graph.n_forward]) for v in op.outputs}
    rows: list[int] = []
    for i, op in enumerate(graph.ops):
        read = [producer[name] for name in op.inputs if name in producer]
        rows.append(i if i < graph.n_forward else max(read, default=rows[-1] if rows else 0))
    return _merged([op.name for op in graph.ops[: max(graph.n_forward, 1)]], rows)


def _merged(titles: Sequence[str], rows: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    size = -(-len(titles) // MANY)
    if size <= 1:
        return tuple(titles), tuple(rows)
    firsts = range(0, len(titles), size)
    lasts = [min(first + size, len(titles)) - 1 for first in firsts]
    merged = [
        titles[first] if first == last else f"{titles[first]} to {titles[last]}"
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return tuple(merged), tuple(row // size for row in rows)
