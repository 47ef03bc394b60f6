"""Runs of an op in two neighbouring intervals at once, as rows of a cut program.

A cut put between two others splits their interval. What the program of before said of the
interval as a whole is true still, of ops that run again in either half; as rows it keeps the
linear relaxation from falling where cuts are added, which it does without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.solver.bounds.cut_program import CutProgram

Interval = tuple[int, int]


def add_spans(made: CutProgram, added: Sequence[int]) -> None:
    """Rows for each interval that `added`, the cuts in order of their addition, has split."""
    end = made.problem.n_ops
    places = [*made.cuts, end]
    runs: dict[Interval, dict[int, int]] = {
        (places[k], places[k + 1]): dict(made.again[k]) for k in range(len(made.cuts))
    }
    for first, between, last in reversed(_splits(added, end)):
        left, right = runs[first, between], runs[between, last]
        runs[first, last] = _add_span(made, (first, last), left, right)


def _splits(added: Sequence[int], end: int) -> list[tuple[int, int, int]]:
    """Which interval each cut has split: its first cut, the new one, its last."""
    found: list[tuple[int, int, int]] = []
    for i, t in enumerate(added):
        before = [other for other in added[:i] if other < t]
        if before:
            found.append((max(before), t, min((u for u in added[:i] if u > t), default=end)))
    return found


def _add_span(
    made: CutProgram, span: Interval, left: dict[int, int], right: dict[int, int]
) -> dict[int, int]:
    """Variables of ops that run again in `span`, and the rows of an interval for them.

    halves <= again in the span <= sum of halves. Whole, so that it can be branched on.
    """
    k = made.cuts.index(span[0])
    runs: dict[int, int] = {}
    for op, half in left.items():
        runs[op] = made.program.variable(integer=True)
        halves = [(half, 1.0)] + ([(right[op], 1.0)] if op in right else [])
        made.program.row([*halves, (runs[op], -1.0)], lower=0.0)
        for index, _ in halves:
            made.program.row([(runs[op], 1.0), (index, -1.0)], lower=0.0)
    made.needs_inputs(k, runs)
    made.cover(k, made.wanted_between(*span), runs)
    if span[1] in made.cuts:
        made.carry_what_is_there(made.cuts.index(span[1]), k, runs)
    return runs
