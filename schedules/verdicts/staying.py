"""The same schedule with the values of one op kept from their first run to their last use."""

from __future__ import annotations

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Free, Schedule, Step


def staying(graph: TrainingGraph, schedule: Schedule, op: str) -> Schedule:
    """`schedule` without the further runs of `op`; its values are kept in between.

    Nothing else changes: ops that ran again only for the sake of `op` still do. So the peak of the
    result is what keeping these values takes.
    """
    held = set(graph.ops[graph.op_index[op]].outputs)
    runs = [i for i, step in enumerate(schedule.steps) if step == Compute(op)]

    def stays(i: int, step: Step) -> bool:
        """Frees of the op's values stay only after its last run: earlier ones are made again."""
        if isinstance(step, Compute):
            return i not in runs[1:]
        return step.value not in held or (isinstance(step, Free) and i > runs[-1])

    steps = [step for i, step in enumerate(schedule.steps) if stays(i, step)]
    return Schedule.for_graph(graph, steps, solver=schedule.solver)
