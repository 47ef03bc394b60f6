"""A schedule as it runs: when each op runs, how much is live meanwhile, which values are there.

Everything that draws or exports a schedule reads a `Timeline`. Bytes and times are those of
`simulate`, so no picture can say otherwise than the judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.as_planned import as_planned
from remat.schedules.kept_in_forward import end_of_forward
from remat.schedules.schedule import Compute, Schedule, brought, dropped
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Residence:
    """A value is on the device from run `begin` to before run `end`."""

    value: str
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """The runs of a schedule in order. Each array has one entry a run.

    Attributes
    ----------
    graph, schedule, simulation : what ran, and what `simulate` said of it.
    steps : indices into the schedule's steps. ops : indices into the graph's ops.
    start_us : when the run begins, [runs]; `end_us` is when the last one ends.
    live_bytes : live while it runs, [runs], as `simulate` has it.
    again : whether the op has run before, [runs].
    """

    graph: TrainingGraph
    schedule: Schedule
    simulation: Simulation
    steps: Ints
    ops: Ints
    start_us: Floats
    live_bytes: Ints
    again: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.steps)

    def op_of(self, run: int) -> Op:
        """The op of a run."""
        return self.graph.ops[int(self.ops[run])]

    @property
    def is_timed(self) -> bool:
        """Whether the ops have prices."""
        return self.simulation.time_us > 0

    @cached_property
    def edges(self) -> Floats:
        """Where runs begin, and where the last ends, [runs + 1]: in ms, or in runs if unpriced."""
        if not self.is_timed:
            return np.arange(len(self) + 1, dtype=np.float64)
        return np.append(self.start_us, self.simulation.time_us) / 1e3

    @property
    def axis_title(self) -> str:
        """What `edges` count."""
        return "time in the step (ms)" if self.is_timed else "runs of ops"

    @cached_property
    def peak_run(self) -> int:
        """The run at which the peak is first reached."""
        return max(int(np.searchsorted(self.steps, self.simulation.peak_step, "right")) - 1, 0)

    @cached_property
    def forward_runs(self) -> int:
        """How many runs there are until forward ends."""
        end = end_of_forward(self.graph, self.schedule)
        return len(self) if end is None else int(np.searchsorted(self.steps, end))

    @cached_property
    def residences(self) -> tuple[Residence, ...]:
        """Each stay of each value on the device, in the order of their ends."""
        found: list[Residence] = []
        since: dict[str, int] = {}
        run = 0
        for step in self.schedule.steps:
            if isinstance(step, Compute):
                outputs = self.graph.ops[self.graph.op_index[step.op]].outputs
                since |= {name: run for name in outputs if name not in since}
                run += 1
            elif brought(step):
                since[step.value] = run
            elif dropped(step):
                found.append(Residence(step.value, since.pop(step.value), run))
        found += [Residence(name, begin, run) for name, begin in since.items()]
        return tuple(found)


def timeline(graph: TrainingGraph, schedule: Schedule) -> Timeline:
    """`schedule` as it runs over `graph`.

    Raises
    ------
    ScheduleError : the schedule is not one of this graph, or breaks a rule of `simulate`.
    """
    graph = as_planned(graph, schedule)
    simulation = simulate(graph, schedule)
    runs = [(i, step.op) for i, step in enumerate(schedule.steps) if isinstance(step, Compute)]
    steps = np.array([i for i, _ in runs], dtype=np.int64)
    ops = np.array([graph.op_index[name] for _, name in runs], dtype=np.int64)
    again = np.ones(len(ops), dtype=np.bool_)
    again[np.unique(ops, return_index=True)[1]] = False
    before_us = np.concatenate([[0.0], simulation.clock_us])[steps]
    waits_us = np.zeros(len(schedule.steps))
    for stall in simulation.stalls:
        waits_us[stall.step] += stall.us
    return Timeline(
        graph=graph,
        schedule=schedule,
        simulation=simulation,
        steps=steps,
        ops=ops,
        start_us=before_us + waits_us[steps],
        live_bytes=np.array(simulation.live_bytes, dtype=np.int64)[steps],
        again=again,
    )
