"""What updates take where gradients are there before the step: less with each that came earlier.

A plan that accumulates counts all of ``.grad`` through the whole step, as it is in each batch but
the last. In the last one an update lets go of the ``.grad`` of its parameters. So the bytes that a
later update takes are first those that earlier ones gave back, and only the rest is above what the
other batches need at that place.
"""

from __future__ import annotations

from collections.abc import Iterable

from remat.graph_capture.graph import UPDATE, TrainingGraph
from remat.schedules.schedule import Compute, Schedule


def workspaces_of_updates(graph: TrainingGraph, schedule: Schedule) -> dict[str, int]:
    """`update_workspaces` in the order in which `schedule` runs the ops of `graph`."""
    return update_workspaces(
        graph, (step.op for step in schedule.steps if isinstance(step, Compute))
    )


def update_workspaces(graph: TrainingGraph, sequence: Iterable[str]) -> dict[str, int]:
    """Workspace in bytes of each update that is not that of its op; empty without accumulation.

    Parameters
    ----------
    sequence : names of ops in the order in which they run.
    """
    if not graph.resident.gradients_bytes:
        return {}
    found: dict[str, int] = {}
    given_back_bytes = 0
    for name in sequence:
        op = graph.ops[graph.op_index[name]] if name in graph.op_index else None
        if op is None or op.target != UPDATE:
            continue
        found[name] = max(0, op.workspace_bytes - given_back_bytes)
        values = (graph.value_by_name[read] for read in op.inputs)
        given_back_bytes += sum(v.size_bytes for v in values if v.kind == "parameter")
    return found
