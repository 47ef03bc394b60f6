"""The fewest bytes to save so that backward can make the rest again without banned ops.

Source: the partition of joint graphs in PyTorch (torch/_functorch/partitioners.py), a minimum
cut between what forward makes and what backward reads. Each value is an arc whose capacity is its
bytes. An op that may run again joins what it reads to what it makes without limit. Of several
minimum cuts the one nearest to backward is taken, as it recomputes least.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from ortools.graph.python import max_flow

from remat.solver.problem import Problem
from remat.solver.templates.template import read_in_backward, unavoidable

SOURCE, SINK = 0, 1


def cheapest_saved(problem: Problem, banned: Collection[int]) -> list[int]:
    """Values of least total bytes from which all that backward reads can be made.

    Forward ops that are `banned` or pinned do not run again. What the caller holds is free.
    """
    flow = cast(Any, max_flow.SimpleMaxFlow())
    unlimited = sum(problem.size_bytes) + 1
    for v, op in enumerate(problem.producer):
        if op < problem.n_forward:
            size_bytes = 0 if v in problem.held else problem.size_bytes[v]
            flow.add_arc_with_capacity(_made(v), _at_hand(v), size_bytes)
    for op in range(problem.n_forward):
        fixed = problem.pinned[op] or op in banned
        sources = [SOURCE] if fixed else [_at_hand(v) for v in problem.inputs[op]]
        for v in problem.outputs[op]:
            for source in sources:
                flow.add_arc_with_capacity(source, _made(v), unlimited)
    for v in read_in_backward(problem):
        flow.add_arc_with_capacity(_at_hand(v), SINK, unlimited)
    if flow.num_arcs() == 0:
        return []
    flow.solve(SOURCE, SINK)
    beyond = set(cast("list[int]", flow.get_sink_side_min_cut()))
    forward = (v for v, op in enumerate(problem.producer) if op < problem.n_forward)
    return [v for v in forward if _made(v) not in beyond and _at_hand(v) in beyond]


def template_kept(problem: Problem, saved: Collection[int]) -> bytearray:
    """The `saved` values, and those that every template keeps."""
    kept = unavoidable(problem)
    for v in saved:
        kept[v] = 1
    return kept


def _made(v: int) -> int:
    return 2 * v + 2


def _at_hand(v: int) -> int:
    return 2 * v + 3
