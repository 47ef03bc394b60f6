"""Writes the schedule of a planned step of layers out op by op.

Each layer runs the ops of its option, with what the option computes again; copies stand where the
plan has them, one for each tensor. A value is dropped right after its last use before it is made
again, so the peak is at most that of the plan of layers, and `simulate` tells it to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import Simulation, simulate
from remat.whole_step.microbatch import Layer, ParameterUpdate, UpdateGroup
from remat.whole_step.planned_step import PlannedStep, StepTask
from remat.whole_step.step_graph import GroupPlace, OpByOp

_LASTING = ("G:", "O:")
"""How values begin that are dropped where the plan says so, and not after their last use."""


@dataclass
class _OpWriter:
    """Writes one step out.

    `options` : of each microbatch, the option of each layer. `touches` : by value, the places in
    the step at which an op makes it (True) or reads it (False). `saved` : of each layer and
    microbatch whose saved values go down, these values. `left` : values of layers that have a copy
    below and are still to be dropped from the device. `fetched_at` : of each value of the plan that
    comes back, how many runs are done by then.
    """

    parts: OpByOp
    options: Sequence[Sequence[int]]
    touches: dict[str, dict[int, bool]] = field(default_factory=dict[str, dict[int, bool]])
    saved: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    left: set[str] = field(default_factory=set[str])
    fetched_at: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.captured = self.parts.captured
        self.ops = {op.name: op for op in self.captured.ops}
        self.outputs = set(self.captured.forward_outputs) & set(self.captured.outputs)

    def steps(self, planned: Sequence[Step]) -> list[Step]:
        # What to drop, and what to send down, depends on the runs that follow.
        runs, found = self._needed([list(self._runs(step)) for step in planned]), list[Step]()
        whole, at = set[str](), 0
        for step, each in zip(planned, runs, strict=True):
            for run in each:
                made, read = self._values_of(run)
                self._require_unshared(run, read, whole)
                for name in (*read, *made):
                    self.touches.setdefault(name, {})[at] = name in made
                at += 1
            if isinstance(step, Fetch) and step.to == "device":
                self.fetched_at[step.value] = at
        at = 0
        for step, each in zip(planned, runs, strict=True):
            for run in each:
                found.append(Compute(run))
                found += map(Free, self._dead_after(run, at))
                at += 1
            if not isinstance(step, Compute):
                found += self._moved(step, at)
        return found

    def _needed(self, runs: list[list[str]]) -> list[list[str]]:
        """Without gathers of parameters that nothing reads before the next one."""
        found, read = list[list[str]](), set[str]()
        for each in reversed(runs):
            kept = list[str]()
            for run in reversed(each):
                whole = f"A:{run.removeprefix('gather:')}"
                if run.startswith("gather:") and whole not in read:
                    continue
                read.discard(whole)
                read.update(self._values_of(run)[1])
                kept.append(run)
            found.append(kept[::-1])
        return found[::-1]

    def _runs(self, step: Step) -> Iterator[str]:
        if not isinstance(step, Compute):
            return
        kind, _, rest = step.op.partition(".")
        if kind == "update":
            yield from (f"update:{p}" for p in self.parts.microbatch.groups[int(rest)].updated)
            return
        if kind in ("gather", "reduce"):
            which, _, rest = rest.partition(".")
            yield from self._collectives(kind, self.parts.microbatch.groups[int(which)], rest)
            return
        at, i = (int(number) for number in rest.split("."))
        layer, done = self.parts.microbatch.layers[at], set[str]()
        groups = (self.parts.microbatch.groups[g] for g in layer.gives)
        is_adding = i and kind != "forward" and self.parts.microbatch.ranks is None
        added = [p for group in groups for p in group.updated] if is_adding else []
        for name in self._of_layer(kind, layer, self.options[i][at]):
            yield f"{name}.{i}"
            # Only the first run of an op adds its gradient.
            if name not in done:
                finished = self.parts.finished_by.get(name, ())
                yield from (f"add:{parameter}.{i}" for parameter in finished if parameter in added)
                added = [parameter for parameter in added if parameter not in finished]
            done.add(name)
        # The layer above has made the others: the gradient of its input is also that of a
        # parameter.
        yield from (f"add:{parameter}.{i}" for parameter in added)

    def _collectives(self, kind: str, group: UpdateGroup, rest: str) -> Iterator[str]:
        if kind == "gather":
            yield from (f"gather:{name}" for name in group.gradient_of)
            return
        for name in group.updated:
            yield f"reduce:{name}.{rest}"
            # Right away, so that one shard at a time waits to be added.
            yield from (f"add:{name}.{rest}",) if int(rest) else ()

    def _of_layer(self, kind: str, layer: Layer, option: int) -> Iterator[str]:
        """Ops of a phase of a layer; what is computed again right before the turn is forward's."""
        order = [*layer.forward_ops, "", *layer.backward_ops]
        recomputed = layer.options[option].recomputed or ((),) * (len(order) + 1)
        turn = len(layer.forward_ops)
        first = turn + 1 if kind == "backward" else 0
        end = turn if kind == "forward" else len(order)
        for at in range(first, end + 1):
            yield from (order[again] for again in recomputed[at])
            if at < end and at != turn:
                yield order[at]

    def _require_unshared(self, run: str, read: Sequence[str], whole: set[str]) -> None:
        kind, _, rest = run.partition(":")
        if kind in ("gather", "reduce"):
            return
        if rest:
            # After its update, the parameter has other values.
            whole.update([rest] if kind == "update" else ())
            return
        name, i = run.rsplit(".", 1)
        for one in (*read, *self.ops[name].inputs):
            if one in whole:
                raise SolverError(
                    f"plan one batch, without microbatches: {run} of {self.captured.name} reads "
                    f"{one} after it was changed in place"
                )
        # Later microbatches are added to this gradient in place, and ranks reduce theirs so.
        finished = self.parts.finished_by.get(name, ())
        if i == "0" or self.parts.microbatch.ranks is not None:
            whole.update(self.parts.value(self.parts.gradient_of[p], int(i)) for p in finished)

    def _values_of(self, run: str) -> tuple[list[str], list[str]]:
        """What a run makes and reads, of the values that it may be the last to touch."""
        kind, _, rest = run.partition(":")
        if kind == "update":
            return [], [f"G:{rest}"]
        if kind == "gather":
            return [f"A:{rest}"], []
        if kind in ("add", "reduce"):
            parameter, i = rest.rsplit(".", 1)
            summand = self.parts.summand(parameter, int(i))
            if kind == "add":
                return [], [summand]
            return [summand], [self.parts.value(self.parts.gradient_of[parameter], int(i))]
        name, i = run.rsplit(".", 1)
        op, number = self.ops[name], int(i)
        if op.target == TANGENTS:
            # Outputs of the step are never dropped.
            given = [v for v in self.captured.forward_outputs if v not in self.outputs]
            return [], [self.parts.value(v, number) for v in given]
        value_of = self.captured.value_by_name
        read = [self.parts.read(v, number) for v in op.inputs
                if v not in self.outputs and value_of[v].kind != "tangent"
                and (value_of[v].producer or self.parts.read(v, number) != v)]  # fmt: skip
        made = [self.parts.value(v, number) for v in op.outputs if v not in self.outputs]
        return made, read

    def _dead_after(self, run: str, at: int) -> list[str]:
        made, read = self._values_of(run)
        names = dict.fromkeys((*read, *made))
        is_update = run.startswith("update:")
        return [
            name for name in names
            # Gradients and states go where the plan says, or after the update.
            if is_update or (not name.startswith(_LASTING) and not self._is_read_after(name, at))
        ]  # fmt: skip

    def _is_read_after(self, name: str, at: int) -> bool:
        following = (is_made for place, is_made in self.touches[name].items() if place > at)
        return next(following, True) is False  # never touched again

    def _moved(self, step: Free | Fetch | Offload, at: int) -> Iterator[Step]:
        """A copy or a drop of the plan, for each value that it stands for; `at` runs are done."""
        kind, _, rest = step.value.partition(".")
        if kind in ("W", "O", "G"):
            yield from self._moved_group(step, kind, int(rest))
            return
        if kind in ("A", "D"):  # what is whole never moves, and goes after its last use
            return
        for name in self._members(step.value, at):
            if isinstance(step, Free) and step.at == "device":
                if name not in self.left:  # it was dropped after its last use
                    continue
                self.left.discard(name)
            elif isinstance(step, Offload) and step.to == "host":
                self.left.add(name)
            yield replace(step, value=name)

    def _moved_group(self, step: Free | Fetch | Offload, kind: str, at: int) -> Iterator[Step]:
        group = self.parts.microbatch.groups[at]
        if kind == "G" and isinstance(step, Free) and step.at == "device":
            if step.value not in self.left:  # the update has dropped it
                return
            self.left.discard(step.value)
        if kind == "G" and isinstance(step, Offload):
            self.left.add(step.value)
        for name, gradient in group.gradient_of.items():
            # The host's copy of a frozen parameter stays valid.
            if not gradient and (kind != "W" or isinstance(step, Offload)):
                continue
            if kind == "O" and not self.parts.updates[name].state_bytes:
                continue
            yield replace(step, value=name if kind == "W" else f"{kind}:{name}")

    def _members(self, value: str, at: int) -> list[str]:
        """The values that one of the plan stands for which forward has made and backward reads."""
        if value not in self.saved:
            *name, i = value.split(".")
            if name[0] == "S":
                ops = self.parts.microbatch.layers[int(name[1])].forward_ops
                made = dict.fromkeys(v for op in ops for v in self.ops[op].outputs)
                names = [v for v in made if v not in self.parts.microbatch.sizes]
            else:
                names = [".".join(name)]
            found = [self.parts.value(v, int(i)) for v in names]
            # The plan of layers is coarser: it assumes that backward reads all that forward read.
            self.saved[value] = [v for v in found if self._comes_back(v, at, value)]
        return self.saved[value]

    def _comes_back(self, name: str, at: int, value: str) -> bool:
        """Whether a value stays as it is from now until it has come back, and is then read."""
        touches, back = self.touches.get(name, {}), self.fetched_at.get(value, -1)
        if back < 0 or any(is_made for place, is_made in touches.items() if at <= place < back):
            return False
        return any(place < at for place in touches) and self._is_read_after(name, back - 1)


@dataclass(frozen=True)
class StepOfOps:
    parts: OpByOp
    graph: TrainingGraph
    schedule: Schedule
    simulation: Simulation

    @property
    def resting_bytes(self) -> int:
        """In memory between steps: what is resident, and what has its home there."""
        there = (value.size_bytes for value in self.graph.values if value.home == "device")
        return self.graph.resident.total_bytes + sum(there)


def op_by_op(
    captured: TrainingGraph, task: StepTask, planned: PlannedStep,
    updates: Mapping[str, ParameterUpdate],
) -> StepOfOps:  # fmt: skip
    config = planned.config
    places = [GroupPlace("device" if tier == "device" else "host", tier) for tier in config.state]
    parts = OpByOp(captured, task.microbatch, places, task.update, updates, config.microbatches)
    options = [one.options for one in config.passes for _ in range(one.microbatches)]
    steps = _OpWriter(parts, options).steps(planned.schedule.steps)
    # The graph lists ops in the order of their first runs.
    names = dict.fromkeys(step.op for step in steps if isinstance(step, Compute))
    graph = parts.graph(list(names), task.links)
    name = planned.schedule.solver
    schedule = Schedule.for_graph(graph, steps, budget_bytes=task.budget_bytes, solver=name)
    return StepOfOps(parts, graph, schedule, simulate(graph, schedule))
