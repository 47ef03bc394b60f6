"""From the run of a block in the model's graph to the schedule of the block's own graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.block_match import BlockMatch
from remat.schedules.schedule import Compute, Fetch, Schedule, Step
from remat.solver.problem import Problem
from remat.solver.sequence import end_of_forward, schedule_of

Moves = Mapping[int, Sequence[Step]]
"""Copies and frees of what is copied, by the position of the op that they stand before."""


def own_schedule(graph: TrainingGraph, match: BlockMatch, run: Sequence[Step]) -> Schedule:
    """The schedule of a block's own `graph` that makes a run of `GivenBlocks.runs`.

    Tangents, which the model's graph has no op for in the block, come as forward ends. What is
    copied has left the device by then.
    """
    problem = Problem.of(graph)
    op_in_block = {theirs: mine for mine, theirs in match.op_of.items()}
    value_in_block = {theirs: mine for mine, theirs in match.value_of.items()}
    ops: list[int] = []
    moves: dict[int, list[Step]] = {}
    for step in run:
        if not isinstance(step, Compute):
            own = msgspec.structs.replace(step, value=value_in_block[step.value])
            moves.setdefault(len(ops), []).append(own)
        elif step.op in op_in_block:
            ops.append(graph.op_index[op_in_block[step.op]])
    end = end_of_forward(problem, ops) + 1
    ops.insert(end, graph.n_forward)
    schedule = schedule_of(problem, ops, solver="blocks")
    if not moves:
        return schedule
    names = [graph.ops[op].name for op in ops]
    steps = _with_moves(schedule.steps, names, _around_tangents(moves, end))
    return msgspec.structs.replace(schedule, steps=tuple(steps))


def _around_tangents(moves: Moves, end: int) -> Moves:
    """`moves` with the op at position `end` inserted: what fetches comes after it."""
    shifted = {at + (at > end): steps for at, steps in moves.items()}
    at_turn = moves.get(end, ())
    first = next((i for i, step in enumerate(at_turn) if isinstance(step, Fetch)), len(at_turn))
    return {**shifted, end: at_turn[:first], end + 1: at_turn[first:]}


def _with_moves(steps: Sequence[Step], names: Sequence[str], moves: Moves) -> Iterator[Step]:
    """`steps` with moves before the ops of their positions; a run of `names` may be left out."""
    at = 0
    for step in steps:
        if isinstance(step, Compute):
            while True:
                yield from moves.get(at, ())
                at += 1
                if names[at - 1] == step.op:
                    break
        yield step
    for left in range(at, len(names) + 1):
        yield from moves.get(left, ())
