"""The same schedule with the values of one op kept from their first run to their last use."""

from __future__ import annotations

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule, Step, brought, dropped


def staying(graph: TrainingGraph, schedule: Schedule, op: str) -> Schedule:
    """`schedule` without the further runs of `op`, and without copies of its values.

    These are kept in between. Nothing else changes: ops that ran again only for the sake of `op`
    still do. So the peak of the result is what keeping these values takes.
    """
    held = set(graph.ops[graph.op_index[op]].outputs)
    first, *further = [i for i, step in enumerate(schedule.steps) if step == Compute(op)]
    last_there = dict.fromkeys(held, max([first, *further]))
    for i, step in enumerate(schedule.steps):
        if not isinstance(step, Compute) and brought(step) in held:
            last_there[step.value] = max(last_there[step.value], i)

    def stays(i: int, step: Step) -> bool:
        """Frees of the op's values stay only where they do not come again later."""
        if isinstance(step, Compute):
            return i not in further
        return step.value not in held or (dropped(step) in held and i > last_there[step.value])

    steps = [step for i, step in enumerate(schedule.steps) if stays(i, step)]
    return Schedule.for_graph(graph, steps, solver=schedule.solver)
