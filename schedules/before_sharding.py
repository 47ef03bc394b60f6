"""The schedule of a step that was planned as sharded, for the step that is rewritten."""

from __future__ import annotations

from itertools import takewhile

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule, Step


def before_sharding(schedule: Schedule, graph: TrainingGraph) -> Schedule:
    """`schedule` up to the first op that `graph` does not have; the very one if it has all.

    Where a whole model is sharded as one, communication comes last: what the plan does then, such
    as to free gradients that have been reduced, is the wrapper's business.
    """
    if schedule.graph_hash == graph.hash:
        return schedule

    def is_own(step: Step) -> bool:
        return not isinstance(step, Compute) or step.op in graph.op_index

    return Schedule.for_graph(
        graph,
        takewhile(is_own, schedule.steps),
        budget_bytes=schedule.budget_bytes,
        solver=schedule.solver,
        options=schedule.options,
    )
