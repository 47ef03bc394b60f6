"""Replays one stage: which ops run again, in which order, and how high memory rises.

Recomputations run just in time, depth first, or in captured order where that needs less;
a value that is not carried on is freed right after its last use in the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from remat.schedules.schedule import Compute, Free, Step
from remat.solver.problem import Problem

Row = Sequence[int]
"""One entry a value, in value order: 1 where the value is carried into a stage."""


class UnreachableError(Exception):
    """A pinned op would have to run twice."""


class Stage(NamedTuple):
    """One stage, replayed.

    Attributes
    ----------
    recomputed : ops run again before op t, in order.
    cost_us : of those. rise_bytes : most bytes above what was carried in.
    touched : values used, or made and needed, in the stage, ascending.
    """

    recomputed: tuple[int, ...]
    cost_us: float
    rise_bytes: int
    touched: tuple[int, ...]


def replay_stage(
    problem: Problem, carried_in: Row, carried_on: Row, starts: Sequence[int], t: int
) -> Stage:
    """Replay stage t, given what is carried and what is recomputed to be carried on.

    Raises
    ------
    UnreachableError : a value that is not carried comes from an op that must not run twice.
    """
    depth_first = recomputed_in(problem, carried_in, starts, t)
    if not depth_first:
        return _plain_stage(problem, t)
    order, rise_bytes = depth_first, _rise_bytes(problem, carried_in, carried_on, t, depth_first)
    if len(order) > 1:
        captured = sorted(order)
        other_bytes = _rise_bytes(problem, carried_in, carried_on, t, captured)
        if other_bytes < rise_bytes:
            order, rise_bytes = captured, other_bytes
    return Stage(
        tuple(order),
        sum(problem.cost_us[op] for op in order),
        rise_bytes,
        tuple(sorted(_touched(problem, starts, t, order))),
    )


def _plain_stage(problem: Problem, t: int) -> Stage:
    if t == problem.n_ops:
        return Stage((), 0.0, 0, tuple(sorted(problem.needs[t])))
    rise_bytes = problem.output_bytes[t] + problem.workspace_bytes[t]
    return Stage((), 0.0, rise_bytes, tuple(sorted((*problem.needs[t], *problem.outputs[t]))))


def _touched(problem: Problem, starts: Sequence[int], t: int, order: Sequence[int]) -> set[int]:
    touched = {*problem.needs[t], *starts}
    for op in order:
        touched.update(problem.inputs[op])
    if t < problem.n_ops:
        touched.update(problem.outputs[t])
    return touched


def recomputed_in(
    problem: Problem,
    carried_in: Row,
    starts: Sequence[int],
    t: int,
    *,
    own_needs: bool = True,
) -> list[int]:
    """The closure of stage t (or of `starts` alone), depth first: each op after what it reads.

    Raises
    ------
    UnreachableError : it contains a pinned op.
    """
    order: list[int] = []
    seen: set[int] = set()
    for target in (*problem.needs[t], *starts) if own_needs else starts:
        if not carried_in[target] and problem.producer[target] not in seen:
            _visit(problem, carried_in, t, problem.producer[target], seen, order)
    return order


def _visit(
    problem: Problem, carried_in: Row, t: int, root: int, seen: set[int], order: list[int]
) -> None:
    stack = [(root, 0)]
    seen.add(root)
    while stack:
        op, position = stack.pop()
        if problem.pinned[op] or op >= t:
            raise UnreachableError
        reads = problem.inputs[op]
        while position < len(reads):
            v = reads[position]
            position += 1
            below = problem.producer[v]
            if not carried_in[v] and below not in seen:
                seen.add(below)
                stack += [(op, position), (below, 0)]
                break
        else:
            order.append(op)


def closure_cost_us(
    problem: Problem, carried_in: Row, v: int, t: int, paid: Collection[int], most_us: float
) -> float | None:
    """Time of the closure of `v` alone in stage t, ops that are `paid` for left out.

    None if it contains a pinned op, or as soon as it is more than `most_us`.
    """
    already = frozenset(paid)
    root = problem.producer[v]
    seen = {root}
    waiting = [root]
    cost_us = 0.0
    while waiting:
        op = waiting.pop()
        if problem.pinned[op] or op >= t:
            return None
        if op not in already:
            cost_us += problem.cost_us[op]
            if cost_us > most_us:
                return None
        for u in problem.inputs[op]:
            below = problem.producer[u]
            if below not in seen and not carried_in[u]:
                seen.add(below)
                waiting.append(below)
    return cost_us


def _last_uses(problem: Problem, t: int, order: Sequence[int]) -> dict[int, int]:
    last: dict[int, int] = {}
    for position, op in enumerate(order):
        for v in problem.inputs[op]:
            last[v] = position
    for v in problem.needs[t]:
        last[v] = len(order)
    return last


def _rise_bytes(
    problem: Problem, carried_in: Row, carried_on: Row, t: int, order: Sequence[int]
) -> int:
    return max(_heights_bytes(problem, carried_in, carried_on, t, order))


def _heights_bytes(
    problem: Problem, carried_in: Row, carried_on: Row, t: int, order: Sequence[int]
) -> list[int]:
    """Bytes above what was carried in while each op of `order` runs, and op t at last."""
    last = _last_uses(problem, t, order)
    size_bytes = problem.size_bytes
    now = 0
    heights: list[int] = []
    for position, op in enumerate(order):
        heights.append(now + problem.output_bytes[op] + problem.workspace_bytes[op])
        for v in problem.outputs[op]:
            if not carried_in[v] and (carried_on[v] or last.get(v, -1) > position):
                now += size_bytes[v]
        for v in problem.inputs[op]:
            if last[v] == position and not carried_on[v]:
                now -= size_bytes[v]
    if t < problem.n_ops:
        now += problem.output_bytes[t] + problem.workspace_bytes[t]
    return [*heights, now]


def fullest_op(
    problem: Problem, carried_in: Row, carried_on: Row, t: int, order: Sequence[int]
) -> int | None:
    """The op at which most is live among those run again in stage t; None if op t itself is."""
    heights = _heights_bytes(problem, carried_in, carried_on, t, order)
    highest = max(range(len(heights)), key=lambda position: (heights[position], position))
    return order[highest] if highest < len(order) else None


def emit(problem: Problem, kept: Sequence[Row], stages: Sequence[Stage]) -> list[Step]:
    """The steps of a whole schedule: each stage's recomputations, its op, and the frees."""
    steps: list[Step] = []
    for t, stage in enumerate(stages):
        _emit_stage(problem, kept[t + 1], t, stage.recomputed, steps)
    return steps


def _emit_stage(
    problem: Problem, carried_on: Row, t: int, order: Sequence[int], steps: list[Step]
) -> None:
    last = _last_uses(problem, t, order)
    for position, op in enumerate((*order, t) if t < problem.n_ops else order):
        steps.append(Compute(problem.graph.ops[op].name))
        for v in problem.outputs[op]:
            is_wanted = carried_on[v] or last.get(v, -1) > position
            if not is_wanted:
                steps.append(Free(problem.names[v]))
        reads = problem.needs[t] if position == len(order) else problem.inputs[op]
        spent = [v for v in reads if last[v] == position and not carried_on[v]]
        steps += [Free(problem.names[v]) for v in spent]
