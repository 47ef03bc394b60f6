"""A plan with one of its levers off: the same ops in the same order, for the judge to compare.

No solver is asked. What runs again, runs once; what is copied to the host stays on the device; a
region in pieces runs as it was captured; updates at once leave their gradients for after backward.
Values are freed as early as can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from remat.graph_capture.graph import DELIVER, UPDATE, Op, TrainingGraph
from remat.schedules.as_planned import as_planned, whole
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.verdicts.staying import staying
from remat.solver.problem import Problem
from remat.solver.sequence import schedule_of

Off = tuple[TrainingGraph, Schedule]
"""A graph without a lever, and the plan on it."""


def without_recomputation(graph: TrainingGraph, schedule: Schedule) -> Off:
    """Each op at its first run alone; what is copied still is."""
    planned = as_planned(graph, schedule)
    if schedule.moves:
        again = [name for name, runs in schedule.computations().items() if runs > 1]
        for name in again:
            schedule = staying(planned, schedule, name)
        return planned, schedule
    return _in_order(planned, dict.fromkeys(_runs(schedule)))


def without_copies(graph: TrainingGraph, schedule: Schedule) -> Off:
    """Nothing leaves the device, which has no links."""
    planned = msgspec.structs.replace(as_planned(graph, schedule), links=None)
    return _in_order(planned, _runs(schedule))


def without_pieces(graph: TrainingGraph, schedule: Schedule) -> Off:
    """Regions as they were captured: each of their ops where the first that needs it stood."""
    captured, planned = whole(graph), as_planned(graph, schedule)
    named = {one.region for one in schedule.pieces}
    dropped = {name for one in graph.regions if one.name in named for name in one.ops}
    maker = {value.name: value.producer for value in captured.values}
    at, order = captured.op_index, list[str]()
    done: set[str] = set()
    for name in _runs(schedule):
        if name in at and name not in dropped:
            order.append(name)
            continue
        op = planned.ops[planned.op_index[name]]
        made = [maker[value] for value in op.outputs if maker.get(value, "") in dropped]
        wanted = [*made, *([name] if name in dropped else [])]
        needed = _needed(captured, maker, dropped - done, wanted)
        order += needed
        done.update(needed)
    return _in_order(captured, order)


def _needed(
    graph: TrainingGraph, maker: Mapping[str, str], among: set[str], wanted: Iterable[str]
) -> list[str]:
    """Ops of `among` that lead to those that are wanted, these included, in captured order."""
    found: set[str] = set()
    waiting = [name for name in wanted if name in among]
    while waiting:
        name = waiting.pop()
        found.add(name)
        read = (maker.get(value, "") for value in graph.ops[graph.op_index[name]].inputs)
        waiting += [one for one in read if one in among and one not in found]
    return sorted(found, key=graph.op_index.__getitem__)


def without_updates(graph: TrainingGraph, schedule: Schedule) -> Off:
    """Gradients stay to the end of the step, for the optimizer to take them then.

    Where they are added to those of earlier batches, each is handed over as it is made.
    """
    planned = as_planned(graph, schedule)
    updates = {op.name for op in planned.ops if op.target == UPDATE}
    if planned.resident.gradients_bytes:
        ops = tuple(_handing_over(planned, op) for op in planned.ops)
        return _in_order(msgspec.structs.replace(planned, ops=ops), _runs(schedule))
    gradients = (
        name for op in planned.ops if op.name in updates for name in _gradients(planned, op)
    )
    off = msgspec.structs.replace(
        planned,
        ops=tuple(op for op in planned.ops if op.name not in updates),
        outputs=tuple(dict.fromkeys((*planned.outputs, *gradients))),
    )
    return _in_order(off, [name for name in _runs(schedule) if name not in updates])


def _handing_over(graph: TrainingGraph, op: Op) -> Op:
    """An op that updates parameters as one that only hands over their gradients."""
    if op.target != UPDATE:
        return op
    read = tuple(_gradients(graph, op))
    return msgspec.structs.replace(op, target=DELIVER, inputs=read, workspace_bytes=0)


def _gradients(graph: TrainingGraph, op: Op) -> list[str]:
    """What an update reads beside parameters."""
    return [name for name in op.inputs if graph.value_by_name[name].producer]


def _runs(schedule: Schedule) -> list[str]:
    return [step.op for step in schedule.steps if isinstance(step, Compute)]


def _in_order(graph: TrainingGraph, names: Iterable[str]) -> Off:
    sequence = [graph.op_index[name] for name in names]
    return graph, schedule_of(Problem.of(graph), sequence)
