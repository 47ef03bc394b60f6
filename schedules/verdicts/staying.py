"""The same schedule, had the values of one op stayed from their first run to their last use."""

from __future__ import annotations

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Free, Schedule, Step


def staying(graph: TrainingGraph, schedule: Schedule, op: str) -> Schedule:
    """`schedule` without the further runs of `op`, whose values are then kept in between.

    All else stays as it is: what ran again for its sake alone still does. So the peak of this
    schedule says what keeping the values takes, if nothing else is changed.
    """
    held = set(graph.ops[graph.op_index[op]].outputs)
    runs = [i for i, step in enumerate(schedule.steps) if step == Compute(op)]

    def stays(i: int, step: Step) -> bool:
        """A value that is dropped before the last run of its op is made again by that."""
        if isinstance(step, Compute):
            return i not in runs[1:]
        return step.value not in held or (isinstance(step, Free) and i > runs[-1])

    steps = [step for i, step in enumerate(schedule.steps) if stays(i, step)]
    return Schedule.for_graph(graph, steps, solver=schedule.solver)
