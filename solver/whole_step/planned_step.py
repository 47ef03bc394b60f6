"""One setting of a whole step, as a schedule that the judge has seen."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links
from remat.graph_capture.optimizer_step.microbatch import Microbatch
from remat.graph_capture.optimizer_step.update import Update
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation
from remat.solver.whole_step.residence import Residence
from remat.solver.whole_step.setting import Setting
from remat.solver.whole_step.steps import StepWriter, host_peak_bytes
from remat.solver.whole_step.streams import Clock, first_clock, streams

ROUNDS = 3
"""How often copies are placed anew by the clock of the schedule before: stalls move needs."""
HOPELESS = 1.05
"""Times the best time, after a first round: what later rounds do not make up for."""


@dataclass(frozen=True)
class StepTask:
    """What is to be planned: a step, and the machine that it must fit.

    Attributes
    ----------
    budget_bytes : on the device's true peak. links : with the room on the host and on NVMe.
    host_computes : whether the host has a processor of its own; else the device makes all updates.
    """

    microbatch: Microbatch
    update: Update
    links: Links
    budget_bytes: int
    host_computes: bool = True

    def feasible(self, setting: Setting) -> Setting:
        """The setting with nothing computed on a host that cannot."""
        if self.host_computes:
            return setting
        return msgspec.structs.replace(setting, sums="device", updates="device")


@dataclass(frozen=True)
class PlannedStep:
    """A setting with its schedule and what the judge says of it."""

    setting: Setting
    graph: TrainingGraph
    schedule: Schedule
    simulation: Simulation


@dataclass(frozen=True)
class Short:
    """Why a setting does not fit: the tier that is too small, and what it would need."""

    tier: str
    need_bytes: int


def planned_step(
    task: StepTask, setting: Setting, name: str, limit_us: float = float("inf")
) -> PlannedStep | Short:
    """The fastest schedule of a setting in `ROUNDS` rounds, or what it lacks.

    A first round far beyond `limit_us` is the last: the others gain less than that.
    """
    graph = setting.graph(task.microbatch, task.update, task.links)
    residence = Residence.of(graph, task.microbatch, setting, task.budget_bytes)
    if residence.peak_bytes > task.budget_bytes:
        return Short("device", residence.peak_bytes)
    clock, best = first_clock(residence), None
    for _ in range(ROUNDS):
        found = streams(residence, setting, task.links, clock, task.budget_bytes)
        writer = StepWriter(graph, residence, found, setting.slots)
        steps = writer.steps()
        need_bytes = host_peak_bytes(graph, steps)
        if need_bytes > task.links.host_bytes:
            return Short("host", need_bytes)
        schedule = Schedule.for_graph(graph, steps, budget_bytes=task.budget_bytes, solver=name)
        simulation = simulate(graph, schedule)
        if best is None or simulation.time_us < best.simulation.time_us:
            best = PlannedStep(setting, graph, schedule, simulation)
        if not simulation.stalls or simulation.time_us > HOPELESS * limit_us:
            break
        clock = _clock_of(writer.places, simulation, len(residence.items))
    assert best is not None
    return best


def device_peak_bytes(task: StepTask, setting: Setting) -> int:
    """The device's peak of a setting's schedule, which copies do not raise."""
    graph = setting.graph(task.microbatch, task.update, task.links)
    return Residence.of(graph, task.microbatch, setting, task.budget_bytes).peak_bytes


def _clock_of(places: list[int], simulation: Simulation, n_items: int) -> Clock:
    """The judge's clock before each event: after the last step of the event before."""
    clock = np.zeros(n_items + 1)
    for at, us in zip(places, simulation.clock_us, strict=True):
        clock[min(at + 1, n_items)] = us
    return np.maximum.accumulate(clock)
