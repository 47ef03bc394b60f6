"""Twins: second runs in backward of forward ops, as ops of the graph, and the way back.

Where backward reads a value that must not be carried out of forward, its op gets a twin in
backward, right before the first reader there; the twin of an op reads the twins of what it
reads. Any solver can plan such a graph. Back on the real graph a twin is a second run.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.solver.bounds.floor import LEAST_BOUND
from remat.solver.clock import Clock
from remat.solver.problem import Problem
from remat.solver.sequence import schedule_of
from remat.solver.stopping import LEFT_OUT

TWIN = "@again"
"""Ends the name of a twin and of its values; no fx node has such a name."""


def without_twins(text: str) -> str:
    """The name of the op or value that a twin stands for; also for several in a sentence."""
    return text.replace(TWIN, "")


def said_of_twins(message: str) -> str:
    """What a solver said of a graph with twins, without a bound that holds for that graph alone."""
    sentences = without_twins(message).split(". ")
    return ". ".join(s for s in sentences if not s.startswith(LEAST_BOUND))


def with_twins(graph: TrainingGraph, again: Set[int]) -> TrainingGraph:
    """`graph` in which backward reads what the ops of `again` make through twins of them."""
    problem = Problem.of(graph)
    renamed = {v: v + TWIN for i in sorted(again) for v in graph.ops[i].outputs}
    done = bytearray(problem.n_ops)
    ops = list(graph.ops[: graph.n_forward])
    for i in range(graph.n_forward, problem.n_ops):
        missing = _missing_below(problem, i, again, done)
        ops += [_twin(graph.ops[below], renamed) for below in missing]
        ops.append(_reading_twins(graph.ops[i], renamed))
    values = [
        msgspec.structs.replace(value, name=value.name + TWIN, producer=value.producer + TWIN)
        for value in graph.values
        if value.producer and done[graph.op_index[value.producer]]
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops), values=(*graph.values, *values))


def _twin(op: Op, renamed: dict[str, str]) -> Op:
    outputs = tuple(renamed[v] for v in op.outputs)
    return msgspec.structs.replace(
        _reading_twins(op, renamed), name=op.name + TWIN, phase="backward", outputs=outputs
    )


def _reading_twins(op: Op, renamed: dict[str, str]) -> Op:
    return msgspec.structs.replace(op, inputs=tuple(renamed.get(v, v) for v in op.inputs))


def _missing_below(problem: Problem, root: int, again: Set[int], done: bytearray) -> list[int]:
    """Ops of `again` that `root` reads, also through others of them, and that are not done.

    Each comes after those that it reads, and is then marked as done.
    """
    order: list[int] = []
    stack = [(root, 0)]
    while stack:
        op, position = stack.pop()
        reads = problem.inputs[op]
        while position < len(reads):
            below = problem.producer[reads[position]]
            position += 1
            if below in again and not done[below]:
                done[below] = 1
                stack += [(op, position), (below, 0)]
                break
        else:
            if op != root:
                order.append(op)
    return order


def renewed_sequence(problem: Problem, schedule: Schedule, again: Set[int]) -> list[int]:
    """The runs of `schedule`, of a graph with twins, as a sequence of the real graph.

    With runs put in, so that nothing in backward reads what an op of `again` made in
    forward: a solver may have carried it to recompute an op that has no twin.
    """
    index = problem.graph.op_index
    runs = [index[without_twins(s.op)] for s in schedule.steps if isinstance(s, Compute)]
    waiting = set(range(problem.n_forward))
    fresh = bytearray(problem.n_ops)
    sequence: list[int] = []
    for op in runs:
        if not waiting:
            sequence += _missing_below(problem, op, again, fresh)
            fresh[op] = 1
        sequence.append(op)
        waiting.discard(op)
    return sequence


def leave_out_runs(
    problem: Problem,
    sequence: Sequence[int],
    again: Set[int],
    budget_bytes: int,
    time_limit_s: float,
) -> list[int]:
    """`sequence` without the runs whose values can as well be kept within the budget.

    The dearest runs are tried first. The first run in backward of an op of `again` stays.
    """
    clock = Clock(time_limit_s)
    spare = _repeats(problem, sequence, again)
    spare.sort(key=lambda position: (-problem.cost_us[sequence[position]], position))
    left_out: set[int] = set()
    for position in spare[: LEFT_OUT.at(problem.n_ops)]:
        if clock.left_s < 0:
            break
        trial = _without(sequence, left_out | {position})
        found = simulate(problem.graph, schedule_of(problem, trial))
        if found.peak_bytes <= budget_bytes:
            left_out.add(position)
    return _without(sequence, left_out)


def _repeats(problem: Problem, sequence: Sequence[int], again: Set[int]) -> list[int]:
    """Positions of runs that are neither the first nor, for `again`, the first in backward."""
    waiting = set(range(problem.n_forward))
    ran = bytearray(problem.n_ops)
    ran_in_backward = bytearray(problem.n_ops)
    found: list[int] = []
    for position, op in enumerate(sequence):
        must_stay = not waiting and op in again and not ran_in_backward[op]
        if ran[op] and not must_stay:
            found.append(position)
        ran[op] = 1
        ran_in_backward[op] = not waiting
        waiting.discard(op)
    return found


def _without(sequence: Sequence[int], left_out: Set[int]) -> list[int]:
    return [op for position, op in enumerate(sequence) if position not in left_out]
