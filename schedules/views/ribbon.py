"""The schedule as Checkmate draws it, folded by layer: what runs when (R), what is kept when (S).

Checkmate's R and S are matrices of op by stage. Here a row is a layer and a column is a run, so
that a step of thousands of ops still fits into a picture. A row is not a mean of its ops: what
runs in the layer is drawn run by run.

P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.graph_capture.graph import Ints
from remat.schedules.views.timeline import Timeline, rows_of_ops


@dataclass(frozen=True)
class Span:
    """In row `row`, from run `begin` to before run `end`."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Ribbon:
    """Spans of first runs by phase, and `recompute` of all later ones.

    In `holds` a forward value of the row is live; in `holds_most` these have at least half of the
    most bytes that the row ever holds.
    """

    titles: tuple[str, ...]
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    recompute: tuple[Span, ...]
    holds: tuple[Span, ...]
    holds_most: tuple[Span, ...]


def ribbon(line: Timeline) -> _Ribbon:
    titles, row_of_op = rows_of_ops(line.graph)
    rows = np.array(row_of_op, dtype=np.int64)[line.ops]
    is_forward = line.ops < line.graph.n_forward
    held = _held_bytes(line, row_of_op, len(titles))
    most = held.max(axis=1, keepdims=True, initial=0)
    return _Ribbon(
        titles=titles,
        forward=_spans_of_runs(rows, is_forward & ~line.again),
        backward=_spans_of_runs(rows, ~is_forward & ~line.again),
        recompute=_spans_of_runs(rows, line.again),
        holds=_spans_of_mask(held > 0),
        # Leave out rows that hold nothing.
        holds_most=_spans_of_mask((held > 0) & (2 * held >= most)),
    )


def _held_bytes(line: Timeline, row_of_op: tuple[int, ...], n_rows: int) -> Ints:
    """Bytes of forward values that each row holds during each run, [rows, runs]."""
    graph = line.graph
    change = np.zeros((n_rows, len(line) + 1), dtype=np.int64)
    for stay in line.residences:
        value = graph.value_by_name[stay.value]
        maker = graph.op_index[value.producer]
        if maker < graph.n_forward:
            change[row_of_op[maker], stay.begin] += value.size_bytes
            change[row_of_op[maker], stay.end] -= value.size_bytes
    return np.cumsum(change, axis=1)[:, :-1]


def _spans_of_runs(
    rows: Ints, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> tuple[Span, ...]:
    spans: list[Span] = []
    for run in np.flatnonzero(chosen).tolist():
        row = int(rows[run])
        if spans and spans[-1].row == row and spans[-1].end == run:
            spans[-1] = Span(row, spans[-1].begin, run + 1)
        else:
            spans.append(Span(row, run, run + 1))
    return tuple(spans)


def _spans_of_mask(mask: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> tuple[Span, ...]:
    # Pad, so that spans at either end have two edges too.
    padded = np.pad(mask.astype(np.int8), ((0, 0), (1, 1)))
    edges = np.diff(padded, axis=1)
    spans: list[Span] = []
    for row, edge in enumerate(edges):
        begins, ends = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
        spans += [Span(row, int(b), int(e)) for b, e in zip(begins, ends, strict=True)]
    return tuple(spans)
