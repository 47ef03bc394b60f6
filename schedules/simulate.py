"""The only judge: what a schedule needs, step by step, in bytes and in time.

This file is short, knows no solver, and is slow enough to be obviously right. Every peak, time,
overhead and gap that `remat` prints comes from `simulate`. Solvers keep faster books of their own;
each of their schedules is judged here once before it leaves `solver/`.
"""

from __future__ import annotations

import msgspec

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import UPDATE, Op, TrainingGraph
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.update_workspaces import workspaces_of_updates
from remat.schedules.verdicts.globs import asked_again, is_freed


class Simulation(msgspec.Struct, frozen=True):
    """What `simulate` found.

    Attributes
    ----------
    peak_bytes : the most bytes live at once, resident ones included.
    peak_step : index of the step at which the peak is first reached.
    time_us : sum of the costs of all computations.
    overhead : `time_us` over the time of computing every op once, minus one.
    live_bytes : one number a step: bytes live while it runs.
    held_at_peak : values live at the peak, largest first, outputs of its op included.
    workspace_at_peak_bytes : workspace of the op at the peak.
    """

    peak_bytes: int
    peak_step: int
    time_us: float
    overhead: float
    live_bytes: tuple[int, ...]
    held_at_peak: tuple[str, ...]
    workspace_at_peak_bytes: int

    def __repr__(self) -> str:
        return (
            f"Simulation(peak {self.peak_bytes} bytes at step {self.peak_step}, "
            f"{self.time_us:.0f} us, overhead {100 * self.overhead:.2f} %)"
        )


def simulate(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    """Replay `schedule` over `graph` and check every rule.

    While an op runs, all of these are live: what is resident, every value that has not been
    freed, the op's inputs, outputs and workspace. An output that was live already keeps its copy;
    the second copy that the run makes of it counts only while the op runs. A region that the
    schedule runs in pieces has the ops of that choice of `graph`.

    Raises
    ------
    ScheduleError : the schedule was made for another graph, or a step breaks a rule (an input
        is not live, a pinned op is computed twice, an output of the step is lost, ...). The
        message names the step and the op.
    """
    graph = as_planned(graph, schedule)
    schedule.check_made_for(graph)
    return _Replay(graph, schedule).run(schedule.steps)


def require_valid(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    """Refuse a schedule that is not one of `graph`, before anything is made of it; judge others.

    `graph` is the very one that is to be carried out, with regions in pieces. A hash says only
    that a schedule was made for it: steps that were doubled, dropped or moved since train with
    other gradients than eager's, or hold more than was promised.

    Raises
    ------
    ScheduleError : it was made for another graph, or a step breaks a rule.
    """
    schedule.check_made_for(graph)
    return simulate(graph, schedule)


def overhead_of(time_us: float, base_us: float) -> float:
    """`time_us` as an overhead over a step of `base_us`: 0 or more, also where that takes no time.

    For times of schedules and for lower bounds on them.
    """
    return max(time_us / base_us - 1, 0.0) if base_us else 0.0


class _Replay:
    def __init__(self, graph: TrainingGraph, schedule: Schedule) -> None:
        self.graph, self.asked = graph, asked_again(schedule)
        self.update_workspaces = workspaces_of_updates(graph, schedule)
        self.size = {v.name: v.size_bytes for v in graph.values if v.producer}
        self.resident = {v.name for v in graph.values if not v.producer}
        self.live: dict[str, None] = {}
        self.offloaded: set[str] = set()
        self.computed: set[str] = set()
        self.bytes = graph.resident.total_bytes
        self.time_us = 0.0
        self.forward_left = graph.n_forward
        # The caller holds outputs of forward until the step ends. New values of buffers are outputs
        # of forward alone: AOTAutograd copies them into the buffers as forward ends.
        self.held = set(graph.forward_outputs) & set(graph.outputs)
        self.rank = {name: i for i, name in enumerate(graph.ordered_ops)}
        self.ordered_done = 0
        self.updated: dict[str, str] = {}
        self.opening = {op.name for op in graph.ops if op.target == "remat.tangents"}

    def run(self, steps: tuple[Step, ...]) -> Simulation:
        curve: list[int] = []
        peak_bytes, peak_step, at_peak, workspace = self.bytes, 0, tuple[str, ...](), 0
        for i, step in enumerate(steps):
            running = self._step(i, step)
            curve.append(running)
            if running > peak_bytes:
                peak_bytes, peak_step = running, i
                at_peak = tuple(self.live)
                op = self._op_at(step)
                workspace = self._workspace_bytes(op) if op else 0
        self._check_end(len(steps))
        return Simulation(
            peak_bytes=peak_bytes,
            peak_step=peak_step,
            time_us=self.time_us,
            overhead=overhead_of(self.time_us, self.graph.base_us),
            live_bytes=tuple(curve),
            held_at_peak=tuple(sorted(at_peak, key=lambda name: -self.size[name])),
            workspace_at_peak_bytes=workspace,
        )

    def _step(self, i: int, step: Step) -> int:
        """Carry out one step; return the bytes live while it ran."""
        if isinstance(step, Compute):
            return self._compute(i, step.op)
        if isinstance(step, Fetch):
            self._require(step.value in self.offloaded, i, f"{step.value} is not offloaded")
            self.offloaded.discard(step.value)
            self._add(step.value)
            return self.bytes
        before = self.bytes
        self._drop(i, step)
        return before

    def _compute(self, i: int, name: str) -> int:
        op = self._lookup(i, name)
        again = name in self.computed
        may = not (again and op.pinned) or is_freed(op, self.asked)
        self._require(may, i, f"op {name} must not run twice: {op.pinned}")
        for value in op.inputs:
            present = value in self.live or value in self.resident
            self._require(present, i, f"op {name} reads {value}, which is not live")
            by = self.updated.get(value, "")
            self._require(not by, i, f"op {name} reads {value}, which op {by} has updated")
        if op.target == UPDATE:
            self.updated |= {value: name for value in op.inputs if value in self.resident}
        fresh = [value for value in op.outputs if value not in self.live]
        self._require(not again or bool(fresh), i, f"op {name} makes nothing that is not live")
        made_bytes = sum(self.size[v] for v in op.outputs)
        running = self.bytes + self._workspace_bytes(op) + made_bytes
        for value in fresh:
            self._require(value not in self.offloaded, i, f"{value} is offloaded: fetch it")
            self._add(value)
        if not again:
            self._check_order(i, op)
        self.time_us += op.cost_us
        self.computed.add(name)
        if not again and op.phase == "forward":
            self.forward_left -= 1
            if self.forward_left == 0:
                self._check_live(self.graph.forward_outputs, i, "forward ends")
        elif op.phase == "backward":
            self._require(self.forward_left == 0, i, f"backward op {name} runs before forward ends")
        return running

    def _workspace_bytes(self, op: Op) -> int:
        return self.update_workspaces.get(op.name, op.workspace_bytes)

    def _check_order(self, i: int, op: Op) -> None:
        """First runs may come in any order that gives the same bits.

        Ops that draw share one random stream, and ops with effects share the buffers: these keep
        their captured order. `remat.tangents` opens backward.
        `tests/rewriter/test_reordered.py` trains random orders against eager.
        """
        if op.name in self.rank:
            due = self.graph.ordered_ops[self.ordered_done]
            self._require(
                op.name == due, i, f"op {op.name} must first run after {due}, as captured"
            )
            self.ordered_done += 1
        is_opened = self.opening <= self.computed or op.name in self.opening
        self._require(op.phase == "forward" or is_opened, i, f"op {op.name} runs before tangents")

    def _drop(self, i: int, step: Free | Offload) -> None:
        name = step.value
        self._require(name in self.live, i, f"{name} is not live, so it cannot be dropped")
        handed_over = self.forward_left == 0 and name in self.held
        self._require(not handed_over, i, f"{name} is in the caller's hands until the step ends")
        del self.live[name]
        self.bytes -= self.size[name]
        if isinstance(step, Offload):
            self.offloaded.add(name)

    def _add(self, name: str) -> None:
        self.live[name] = None
        self.bytes += self.size[name]

    def _check_end(self, n_steps: int) -> None:
        for op in self.graph.ops:
            self._require(op.name in self.computed, n_steps, f"op {op.name} is never computed")
        self._check_live(self.graph.outputs, n_steps, "the step ends")

    def _check_live(self, names: tuple[str, ...], i: int, when: str) -> None:
        for name in names:
            present = name in self.live or name in self.resident
            self._require(present, i, f"{name} must be live when {when}")

    def _lookup(self, i: int, name: str) -> Op:
        index = self.graph.op_index.get(name)
        self._require(index is not None, i, f"the graph has no op {name}")
        assert index is not None
        return self.graph.ops[index]

    def _op_at(self, step: Step) -> Op | None:
        return self._lookup(0, step.op) if isinstance(step, Compute) else None

    @staticmethod
    def _require(holds: bool, i: int, message: str) -> None:
        if not holds:
            raise ScheduleError(f"invalid schedule at step {i}: {message}")
