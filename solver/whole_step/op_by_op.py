"""A planned step of layers, op by op: what is run, and what the judge says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.optimizer_step.graph import GroupPlace
from remat.graph_capture.optimizer_step.op_by_op import OpByOp
from remat.graph_capture.optimizer_step.update import ParameterUpdate
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation
from remat.solver.whole_step.op_writer import OpWriter
from remat.solver.whole_step.planned_step import PlannedStep, StepTask


@dataclass(frozen=True)
class StepOfOps:
    """A step op by op: its parts, its graph and schedule, and what the judge says of them."""

    parts: OpByOp
    graph: TrainingGraph
    schedule: Schedule
    simulation: Simulation


def op_by_op(
    captured: TrainingGraph,
    task: StepTask,
    planned: PlannedStep,
    updates: Mapping[str, ParameterUpdate],
) -> StepOfOps:
    """The step of a plan, op by op.

    Parameters
    ----------
    captured : the graph of one batch, of which `task` has the layers with their gradients.
    updates : by the captured name of each trained parameter, what its update takes.
    """
    microbatch, setting = task.microbatch, planned.setting
    places = [GroupPlace("device" if tier == "device" else "host", tier) for tier in setting.state]
    parts = OpByOp(captured, microbatch, places, task.update, updates, planned.setting.microbatches)
    options = [one.options for one in setting.passes for _ in range(one.microbatches)]
    writer = OpWriter(parts, options)
    steps = writer.steps(planned.schedule.steps)
    names = dict.fromkeys(step.op for step in steps if isinstance(step, Compute))
    graph = parts.graph(list(names), task.links)
    schedule = Schedule.for_graph(
        graph, steps, budget_bytes=task.budget_bytes, solver=planned.schedule.solver
    )
    return StepOfOps(parts, graph, schedule, simulate(graph, schedule))
