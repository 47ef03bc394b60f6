"""The schedule of a whole step, written from its events and the places of their copies.

The third of three steps from a `Setting` to a schedule. What the host computes is issued right
after the copy of the gradient that it waits for. States on NVMe come up in the order of their
updates, so many ahead as there are slots, and go back down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.optimizer_step.graph import HOST_SUM
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Step
from remat.solver.whole_step.residence import Residence
from remat.solver.whole_step.streams import Streams


@dataclass
class StepWriter:
    """Writes one schedule.

    Attributes
    ----------
    places : of each step that it wrote, the event at which it stands: how the judge's clock of
        steps becomes one of events.
    """

    graph: TrainingGraph
    residence: Residence
    streams: Streams
    slots: int
    places: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.home = {v.name: v.home for v in self.graph.values if not v.producer}
        on_device = self.residence.ops
        late = [op for op in self.graph.ops if op.phase == "update" and op.name not in on_device]
        self.sums = {op.inputs[1]: op for op in late if op.target == HOST_SUM}
        self.updates = {op.inputs[0]: op for op in late if op.target != HOST_SUM}
        self.sums_left = dict[str, int]()
        for op in self.sums.values():
            self.sums_left[op.inputs[0]] = self.sums_left.get(op.inputs[0], 0) + 1
        self.last_leave = {
            item.name: k for k, item in enumerate(self.residence.items) if item.kind == "leave"
        }
        self.waiting = list(self._states_on_nvme())

    def steps(self) -> list[Step]:
        """All steps in order."""
        issued, freed = dict[int, list[str]](), dict[int, list[str]]()
        items = self.residence.items
        for k, at in self.streams.begins.items():
            issued.setdefault(at, []).append(items[k].name)
        for k, at in self.streams.ends.items():
            if at > k:  # what leaves at once is freed where its copy is issued, in `_item`
                freed.setdefault(at, []).append(items[k].name)
        steps = [step for _ in range(self.slots) for step in self._next_state()]
        self.places += [0] * len(steps)
        for k in range(len(items) + 1):
            found: list[Step] = [*map(Free, freed.get(k, ())), *map(Fetch, issued.get(k, ()))]
            if k < len(items):
                found += self._item(k)
            steps += found
            self.places += [k] * len(found)
        return steps

    def _item(self, k: int) -> Iterator[Step]:
        kind, name = self.residence.items[k]
        if kind == "run":
            yield Compute(name)
            for made in self.residence.ops[name].outputs:
                if made in self.residence.hosted:
                    yield Offload(made)
        elif kind == "drop":
            yield Free(name)
            if name in self.residence.hosted:
                yield Free(name, "host")
        elif kind == "leave":
            if name not in self.residence.hosted:
                yield Offload(name)
            if self.streams.ends[k] == k:
                yield Free(name)
            if self.home.get(name) == "nvme":
                yield from self._back_to_nvme(name)
            if name.startswith("G.") and self.last_leave[name] == k:
                yield from self._on_host(name)

    def _on_host(self, gradient: str) -> Iterator[Step]:
        """What the host does with a gradient that has left for the last time."""
        total = gradient
        if gradient in self.sums:
            op = self.sums[gradient]
            total = op.inputs[0]
            yield Compute(op.name, "host")
            yield Free(gradient, "host")
            self.sums_left[total] -= 1
        if self.sums_left.get(total, 0) or total not in self.updates:
            return
        op = self.updates[total]
        yield Compute(op.name, "host")
        yield Free(total, "host")
        for name in op.updates:
            if self.home[name] == "nvme":
                yield from self._back_to_nvme(name)

    def _back_to_nvme(self, state: str) -> Iterator[Step]:
        yield Offload(state, "nvme")
        yield Free(state, "host")
        yield from self._next_state()

    def _states_on_nvme(self) -> Iterator[str]:
        """States below the host, in the order of their updates."""
        left = dict(self.sums_left)
        for k, (kind, name) in enumerate(self.residence.items):
            if kind == "arrive" and self.home.get(name) == "nvme":
                yield name
            if kind != "leave" or not name.startswith("G.") or self.last_leave[name] != k:
                continue
            total = name
            if name in self.sums:
                total = self.sums[name].inputs[0]
                left[total] -= 1
            if not left.get(total, 0) and total in self.updates:
                reads = self.updates[total].inputs
                yield from (one for one in reads if self.home.get(one) == "nvme")

    def _next_state(self) -> Iterator[Step]:
        if self.waiting:
            yield Fetch(self.waiting.pop(0), "host")


def host_peak_bytes(graph: TrainingGraph, steps: list[Step]) -> int:
    """The most bytes on the host, by the order of the steps.

    Asked before the judge is, which refuses a step that finds the host full.
    """
    sizes = {value.name: value.size_bytes for value in graph.values}
    ops = {op.name: op for op in graph.ops}
    there = {v.name for v in graph.values if v.home == "host"}
    now = sum(sizes[name] for name in there)
    peak = now
    for step in steps:
        if isinstance(step, Compute):
            stale = () if step.at == "host" else ops[step.op].updates
            came, went = set[str](), there.intersection(stale)
        elif isinstance(step, Free):
            came, went = set[str](), {step.value} if step.at == "host" else set[str]()
        else:
            came, went = {step.value} if step.to == "host" else set[str](), set[str]()
        now += sum(sizes[name] for name in came) - sum(sizes[name] for name in went)
        there = (there | came) - went if came or went else there
        peak = max(peak, now)
    return peak
