"""Schedules as sequences of ops: each op any number of times, values freed after last use.

The form in which chains, online policies, templates and constraint programs say what runs
when. It can say all that a schedule may do but offload; the frees are placed here, for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.schedules.schedule import Compute, Free, Schedule, Step
from remat.solver.problem import Problem


def schedule_of(
    problem: Problem, sequence: Sequence[int], *, budget_bytes: int = 0, solver: str = ""
) -> Schedule:
    """The schedule that runs the ops of `sequence` in turn; see `steps_of`."""
    steps = steps_of(problem, sequence)
    return Schedule.for_graph(problem.graph, steps, budget_bytes=budget_bytes, solver=solver)


def ops_of(problem: Problem, schedule: Schedule) -> list[int]:
    """The ops that `schedule` runs, in turn."""
    index = problem.graph.op_index
    return [index[step.op] for step in schedule.steps if isinstance(step, Compute)]


def steps_of(problem: Problem, sequence: Sequence[int]) -> list[Step]:
    """Steps that run the ops of `sequence`, each value freed as early as can be.

    A use reads the latest computation before it. A value is freed right after its last use
    before it is made again. An op of several outputs that runs again leaves those that are
    live as they are, and a run whose outputs are all live is left out. An input that was never
    made is an error of `simulate`, which names it.
    """
    lost_after = _lost_after(problem, sequence)
    live = bytearray(problem.n_values)
    steps: list[Step] = []
    for position, op in enumerate(sequence):
        if not problem.outputs[op] or not all(live[v] for v in problem.outputs[op]):
            steps.append(Compute(problem.graph.ops[op].name))
        for v in problem.outputs[op]:
            live[v] = 1
        for v in lost_after[position]:
            if live[v]:
                live[v] = 0
                steps.append(Free(problem.names[v]))
    return steps


def _lost_after(problem: Problem, sequence: Sequence[int]) -> list[list[int]]:
    """For each position the values that nothing reads between it and their next making."""
    lost: list[list[int]] = [[] for _ in sequence]
    wanted = bytearray(problem.n_values)
    for v in problem.needs[problem.n_ops]:
        wanted[v] = 1
    ends = end_of_forward(problem, sequence)
    for position in reversed(range(len(sequence))):
        op = sequence[position]
        if position == ends:
            reads = (*problem.inputs[op], *problem.forward_outputs)
        else:
            reads = problem.inputs[op]
        touched = dict.fromkeys((*problem.outputs[op], *reads))
        lost[position] = [v for v in touched if not wanted[v]]
        for v in problem.outputs[op]:
            if position <= ends or v not in problem.held:
                wanted[v] = 0
        for v in reads:
            wanted[v] = 1
    return lost


def end_of_forward(problem: Problem, sequence: Sequence[int]) -> int:
    """Position of the first run of the last forward op to run, -1 if there is none."""
    waiting = set(range(problem.n_forward))
    for position, op in enumerate(sequence):
        waiting.discard(op)
        if not waiting:
            return position if problem.n_forward else -1
    return -1


def recomputed_by_stage(problem: Problem, sequence: Sequence[int]) -> list[list[int]]:
    """The repeated runs in each stage, for `State.from_recomputed`.

    First runs must be in the problem's order.
    """
    stages: list[list[int]] = [[] for _ in range(problem.n_ops + 1)]
    following = 0
    for op in sequence:
        if op == following:
            following += 1
        else:
            stages[following].append(op)
    return stages
