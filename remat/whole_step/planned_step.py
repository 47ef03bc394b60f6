"""One config of a whole step, as a schedule that the simulator has seen."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.budgets import UNBOUNDED_BYTES
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import Links, Op, TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import Simulation, simulate
from remat.solver.offload.copy_placing import (
    earliest_ends,
    item_at,
    item_before,
    kept_to,
    latest_starts,
    taken_from,
)
from remat.whole_step.microbatch import Microbatch, Update
from remat.whole_step.step_config import StepConfig
from remat.whole_step.step_graph import GROUP_UPDATE, HOST_SUM

_AHEAD = 3  # parameters of so many layers have room kept for them, to arrive before their use


_Bytes = npt.NDArray[np.int64]


class _DeviceEvent(NamedTuple):
    """What leaves goes down; what is dropped has a copy below, or no reader."""

    kind: Literal["arrive", "run", "drop", "leave"]
    name: str


class Residence:
    """The events of one step on the device, as if copies took no time; `hosted` come back.

    A value arrives right before its first use and leaves right after the last before a gap.
    """

    def __init__(self, task: StepTask, config: StepConfig) -> None:
        microbatch, self.config = task.microbatch, config
        self.graph = config.graph(microbatch, task.update, task.links)
        self.order = config.device_order(microbatch, self.graph)
        self.sizes = {value.name: value.size_bytes for value in self.graph.values}
        self.home = {v.name: v.home for v in self.graph.values if not v.producer}
        self.ops = {op.name: op for op in self.order}
        self.uses: dict[str, list[int]] = {}
        for at, op in enumerate(self.order):
            for name in dict.fromkeys((*op.inputs, *op.outputs)):
                # Values whose home is the device never move.
                if self.home.get(name) != "device":
                    self.uses.setdefault(name, []).append(at)
        self.hosted = frozenset(self._hosted(microbatch))
        self.gone: set[tuple[str, int]] = set()
        self._open()
        # First with all gaps open: the remaining room tells which can be closed.
        self.items, self.live_bytes = self._replayed()
        if config.keeping == "near":
            by_size = sorted(group.parameter_bytes for group in microbatch.groups)
            self._close(task.budget_bytes - _AHEAD * by_size[len(by_size) // 2])
            self.items, self.live_bytes = self._replayed()

    @property
    def peak_bytes(self) -> int:
        # Copies never add to it: each waits until there is room.
        return int(self.live_bytes.max(initial=0))

    def _hosted(self, microbatch: Microbatch) -> Iterable[str]:
        first = 0
        for one in self.config.passes:
            for i in range(first, first + one.microbatches):
                for at, layer in enumerate(microbatch.layers[: one.hosted]):
                    names = (f"S.{at}.{i}", *(f"{name}.{i}" for name in layer.reads))
                    # A value with a single use does not come back.
                    yield from (name for name in names if len(self.uses.get(name, ())) > 1)
            first += one.microbatches

    def _open(self) -> None:
        above = [at for at, tier in enumerate(self.config.state) if tier == "device"]
        kept = {f"G.{at}" for at in (*self.config.kept_gradients, *above)}
        for name, uses in self.uses.items():
            gaps = [(b - a, a) for a, b in pairwise(uses) if b - a > 1]
            if name in self.hosted and gaps:
                # An activation leaves only once, in its longest gap.
                self.gone.add((name, max(gaps)[1]))
            elif name.startswith("G.") and name not in kept:
                # A gradient that the device's update reads stays there until then.
                last = self.order[uses[-1]].target == GROUP_UPDATE
                self.gone |= {(name, a) for _, a in gaps if not (last and a == uses[-2])}
            elif name in self.home and self.config.keeping != "stay":
                self.gone |= {(name, a) for _, a in gaps}

    def _close(self, most_bytes: int) -> None:
        items, live_bytes = self.items, self.live_bytes
        places: dict[str, list[int]] = {}
        for k, item in enumerate(items):
            if item.kind in ("arrive", "drop") and item.name in self.home:
                places.setdefault(item.name, []).append(k)
        found = list[tuple[int, int, int, str]]()
        for name, at in places.items():
            found += [(b - a, a, b, name) for a, b in pairwise(at) if items[a].kind == "drop"]
        ran = np.cumsum([item.kind == "run" for item in items]) - 1  # ops, by each event
        # Keep what is needed again soonest: for a known order this moves the fewest bytes (Belady
        # 1966, https://doi.org/10.1147/sj.52.0078; for pages of one size).
        for _, a, b, name in sorted(found):
            # Leave room for the parameters of the layers ahead.
            if int(live_bytes[a:b].max()) + self.sizes[name] <= most_bytes:
                live_bytes[a:b] += self.sizes[name]
                self.gone.discard((name, int(ran[a])))

    def _replayed(self) -> tuple[list[_DeviceEvent], _Bytes]:
        there = {name for name, tier in self.home.items() if tier == "device"}
        now = self.graph.resident.total_bytes + sum(self.sizes[name] for name in there)
        items, live = list[_DeviceEvent](), list[int]()
        for at, op in enumerate(self.order):
            for name in op.inputs:
                if name not in there:
                    there.add(name)
                    now += self.sizes[name]
                    items.append(_DeviceEvent("arrive", name))
                    live.append(now)
            now += sum(self.sizes[name] for name in op.outputs)
            there.update(op.outputs)
            items.append(_DeviceEvent("run", op.name))
            # The workspace goes when the op ends.
            live.append(now + op.workspace_bytes)
            for item in self._ends(at, op):
                live.append(now)
                items.append(item)
                there.discard(item.name)
                now -= self.sizes[item.name]
        return items, np.array(live, np.int64)

    def _ends(self, at: int, op: Op) -> list[_DeviceEvent]:
        """What goes after an op: first what is dropped, then what leaves."""
        found = list[_DeviceEvent]()
        for name in dict.fromkeys((*op.inputs, *op.outputs)):
            if name not in self.uses or name in self.graph.outputs:
                continue
            is_last = self.uses[name][-1] == at
            if not is_last and (name, at) not in self.gone:
                continue
            kind = "leave" if self._goes_down(name, op, is_last) else "drop"
            found.append(_DeviceEvent(kind, name))
        return sorted(found, key=lambda item: item.kind == "leave")

    def _goes_down(self, name: str, op: Op, is_last: bool) -> bool:
        """Whether the device holds what no lower tier has."""
        if op.target == GROUP_UPDATE:
            # For values that it has not rewritten, the lower copy is still valid.
            return name in op.updates
        if name.startswith("G."):
            return True
        return name in self.hosted and not is_last


_Clock = npt.NDArray[np.float64]  # the device's time before each event, and after the last


def _departures(residence: Residence, links: Links, clock: _Clock, room: _Bytes) -> dict[int, int]:
    """By event, that before which its bytes are free: it stays while it is copied, in `room`."""
    items, made, backs = residence.items, dict[str, int](), dict[str, list[int]]()
    added = {op.inputs[1]: op.inputs[0] for op in residence.graph.ops if op.target == HOST_SUM}
    for k, item in enumerate(items):
        if item.kind == "arrive":
            backs.setdefault(item.name, []).append(k)
        elif item.name in added and item.kind == "leave":
            # The host adds it to the sum, of which the device's copy is stale from then on.
            backs.setdefault(added[item.name], []).append(k)
        elif item.kind == "run":
            outputs = residence.ops[item.name].outputs
            made |= dict.fromkeys(residence.hosted.intersection(outputs), k)
    leaves = [(made.get(item.name, k), k) for k, item in enumerate(items) if item.kind == "leave"]
    leaves.sort()  # one queue, in the order in which copies may begin
    sizes = residence.sizes
    copies = [(float(clock[min(at + 1, k)]), sizes[items[k].name]) for at, k in leaves]
    whole_us = earliest_ends(copies, links.d2h)
    ends = {k: item_at(clock, us) for (_, k), us in zip(leaves, whole_us, strict=True)}
    for k in sorted(ends):
        name = items[k].name
        back = next((at for at in backs.get(name, ()) if at > k), len(items))
        # It must be gone before it comes back or changes. If its room is needed earlier, it is
        # freed earlier, and the device waits for the copy.
        ends[k] = kept_to(room, k, min(max(ends[k], k), back), sizes[name])
    return ends


def _begins_of_arrivals(
    residence: Residence, links: Links, clock: _Clock, room: _Bytes, ends: dict[int, int]
) -> dict[int, int]:
    """By event, that before which an arrival's copy is issued, in the `room` that is left."""
    items = residence.items
    arrivals = [k for k, item in enumerate(items) if item.kind == "arrive"]
    if not residence.config.prefetch:
        # Without prefetch, each copy is issued at its use.
        return {k: k for k in arrivals}
    needs = [(float(clock[k]), residence.sizes[items[k].name]) for k in arrivals]
    latest_us = latest_starts(needs, links.h2d)
    may = _earliest(residence, ends)
    begins, last = dict[int, int](), 0
    for k, start_us, (_, size_bytes) in zip(arrivals, latest_us, needs, strict=True):
        at = min(max(item_before(clock, start_us), last, may[k]), k)
        # It needs room from here until its use.
        begins[k] = last = taken_from(room, at, k, size_bytes)
    return begins


def _earliest(residence: Residence, ends: dict[int, int]) -> dict[int, int]:
    config = residence.config
    gone, dropped, may, fetched = dict[str, int](), list[int](), dict[int, int](), 0
    read, written = 0, list[int]()
    for k, item in enumerate(residence.items):
        is_weight = item.name.startswith("W.")
        is_read = item.kind in ("arrive", "leave") and config.state_is_on_nvme(item.name)
        if item.kind == "drop":
            gone[item.name] = k + 1
            dropped += [k + 1] if is_weight else []
        elif item.kind == "leave":
            # A value may come back once its bytes are free.
            gone[item.name] = max(ends[k], k + 1)
            written += [k + 1] if is_read else []
        elif item.kind == "arrive":
            # The earlier copy must be gone.
            may[k] = gone.get(item.name, 0)
            if is_read:  # it is read from NVMe once a state before it has made room on the host
                may[k] = written[read - config.slots] if read >= config.slots else 0
                read += 1
            if is_weight:
                # With a window, only the last few parameters may be there.
                before = fetched - config.window
                if config.window and 0 <= before < len(dropped):
                    may[k] = max(may[k], dropped[before])
                fetched += 1
    return may


@dataclass
class _StepWriter:
    """Writes one schedule. `places` has, of each step written, the event at which it stands.

    `states` are those on NVMe, in the order of their updates; None stands for a free slot on the
    host.
    """

    residence: Residence
    begins: dict[int, int]
    ends: dict[int, int]
    places: list[int] = field(default_factory=list[int])
    states: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.home, ops = self.residence.home, self.residence.graph.ops
        on_device = self.residence.ops
        late = [op for op in ops if op.phase == "update" and op.name not in on_device]
        self.sums = {op.inputs[1]: op for op in late if op.target == HOST_SUM}
        self.updates = {op.inputs[0]: op for op in late if op.target != HOST_SUM}
        self.sums_left = Counter(op.inputs[0] for op in self.sums.values())
        # A gradient summed on the device may leave several times; the host waits for the last.
        self.last_leave = {
            item.name: k for k, item in enumerate(self.residence.items) if item.kind == "leave"
        }

    def steps(self) -> list[Step]:
        found, written = list[Step](), list(self._written())
        waiting = iter(self.states)
        for k, step in written:
            # A slot is filled with the next state, if one is left.
            if step is None and (name := next(waiting, "")):
                step = Fetch(name, "host")
            if step is not None:
                found.append(step)
                self.places.append(k)
        return found

    def _written(self) -> Iterator[tuple[int, Step | None]]:
        issued, freed = dict[int, list[str]](), dict[int, list[str]]()
        items = self.residence.items
        for k, at in self.begins.items():
            issued.setdefault(at, []).append(items[k].name)
        for k, at in self.ends.items():
            if at > k:  # what leaves at once is freed where its copy is issued, in `_item`
                freed.setdefault(at, []).append(items[k].name)
        # Fill the host's slots before anything runs.
        yield from [(0, None)] * self.residence.config.slots
        for k in range(len(items) + 1):
            # Free first: the fetches may need that room.
            yield from ((k, Free(name)) for name in freed.get(k, ()))
            yield from ((k, Fetch(name)) for name in issued.get(k, ()))
            if k < len(items):
                yield from ((k, step) for step in self._item(k))

    def _item(self, k: int) -> Iterator[Step | None]:
        kind, name = self.residence.items[k]
        if kind == "run":
            yield Compute(name)
            for made in self.residence.ops[name].outputs:
                if made in self.residence.hosted:
                    # The copy begins here; the value leaves later.
                    yield Offload(made)
        elif kind == "arrive" and self.home.get(name) == "nvme":
            self.states.append(name)
        elif kind == "drop":
            yield Free(name)
            if name in self.residence.hosted:
                yield Free(name, "host")  # dropped after its last use
        elif kind == "leave":
            if name not in self.residence.hosted:
                yield Offload(name)
            if self.ends[k] == k:
                yield Free(name)
            if self.home.get(name) == "nvme":
                yield from self._back_to_nvme(name)
            if name.startswith("G.") and self.last_leave[name] == k:
                yield from self._on_host(name)

    def _on_host(self, gradient: str) -> Iterator[Step | None]:
        total = gradient
        if gradient in self.sums:
            op = self.sums[gradient]
            total = op.inputs[0]
            yield Compute(op.name, "host")
            yield Free(gradient, "host")
            self.sums_left[total] -= 1
        # More microbatches are to be added.
        if self.sums_left[total] or total not in self.updates:
            return
        op = self.updates[total]
        self.states += [one for one in op.inputs if self.home.get(one) == "nvme"]
        yield Compute(op.name, "host")
        yield Free(total, "host")
        for name in op.updates:
            if self.home[name] == "nvme":
                yield from self._back_to_nvme(name)

    def _back_to_nvme(self, state: str) -> Iterator[Step | None]:
        yield Offload(state, "nvme")
        yield Free(state, "host")
        yield None


_ROUNDS = 3
"""How often copies are placed anew by the clock of the schedule before: stalls move needs."""
_HOPELESS = 1.05  # times the best time, after a first round: what later rounds do not make up for


@dataclass(frozen=True)
class StepTask:
    """A step, and the machine that it must fit; the budget is on the device's true peak.

    `host_computes` says that the host has a processor of its own; else the device updates.
    """

    microbatch: Microbatch
    update: Update
    links: Links
    budget_bytes: int
    host_computes: bool = True

    def feasible(self, config: StepConfig) -> StepConfig:
        if self.host_computes:
            return config
        return msgspec.structs.replace(config, sums="device", updates="device")

    def with_rooms(self, rooms: Mapping[str, int]) -> StepTask:
        """The task with other sizes of the ``device`` or the ``host``."""
        host_bytes = rooms.get("host", self.links.host_bytes)
        return dataclasses.replace(
            self, links=msgspec.structs.replace(self.links, host_bytes=host_bytes),
            budget_bytes=rooms.get("device", self.budget_bytes),
        )  # fmt: skip


@dataclass(frozen=True)
class PlannedStep:
    config: StepConfig
    graph: TrainingGraph
    schedule: Schedule
    simulation: Simulation


@dataclass(frozen=True)
class Short:
    """Why a config does not fit: the tier that is too small, and what it would need."""

    tier: str
    need_bytes: int


def planned_step(
    task: StepTask, config: StepConfig, name: str, limit_us: float = float("inf")
) -> PlannedStep | Short:
    """The fastest schedule of a config in `_ROUNDS` rounds, or what it lacks."""
    residence = Residence(task, config)
    graph = residence.graph
    if residence.peak_bytes > task.budget_bytes:
        return Short("device", residence.peak_bytes)
    ops, items = residence.ops, residence.items
    costs = [ops[one.name].cost_us if one.kind == "run" else 0.0 for one in items]
    clock, best = np.concatenate(([0.0], np.cumsum(costs))), None
    for _ in range(_ROUNDS):
        room = task.budget_bytes - residence.live_bytes
        ends = _departures(residence, task.links, clock, room)
        begins = _begins_of_arrivals(residence, task.links, clock, room, ends)
        writer = _StepWriter(residence, begins, ends)
        steps = writer.steps()
        schedule = Schedule.for_graph(graph, steps, budget_bytes=task.budget_bytes, solver=name)
        try:
            simulation = simulate(graph, schedule)
        except ScheduleError:  # the host is full: a larger one tells what the step needs
            roomy = msgspec.structs.replace(task.links, host_bytes=UNBOUNDED_BYTES)
            return Short("host", simulate(graph, schedule, roomy).host_peak_bytes)
        if best is None or simulation.time_us < best.simulation.time_us:
            best = PlannedStep(config, graph, schedule, simulation)
        # Without stalls nothing can be gained; far above the limit, later rounds gain too little.
        if not simulation.stalls or simulation.time_us > _HOPELESS * limit_us:
            break
        # Stalls delay the device, so copies are placed again by the new clock.
        clock = _clock_of(writer.places, simulation, len(items))
    assert best is not None
    return best


def _clock_of(places: list[int], simulation: Simulation, n_items: int) -> _Clock:
    """The simulator's clock before each event: after the last step of the event before."""
    clock = np.zeros(n_items + 1)
    for at, us in zip(places, simulation.clock_us, strict=True):
        clock[min(at + 1, n_items)] = us
    return np.maximum.accumulate(clock)  # events without steps keep the clock before
