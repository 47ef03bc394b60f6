"""The simulator: what a schedule needs, step by step, in bytes and in time.

It is short, knows no solver, and is slow enough to be obviously right. Solvers keep faster books;
each of their schedules is judged here before it leaves `solver/`.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from remat.formats import exact_bytes_text
from remat.graph_capture.errors import ScheduleError, option
from remat.graph_capture.graph import (
    LINK_NAMES,
    LOWER_TIERS,
    TANGENTS,
    TIERS,
    UPDATE,
    WAYS,
    LinkName,
    Links,
    Op,
    Tier,
    TrainingGraph,
)
from remat.schedules.derived import graph_of_schedule
from remat.schedules.schedule import (
    Compute,
    Fetch,
    Free,
    Offload,
    Schedule,
    Step,
    workspaces_of_updates,
)
from remat.schedules.value_report.globs import may_run_twice, recompute_globs


class _Stall(msgspec.Struct, frozen=True):
    step: int
    value: str
    us: float


class Copy(msgspec.Struct, frozen=True):
    step: int
    link: LinkName
    value: str
    size_bytes: int
    start_us: float
    end_us: float


class Simulation(msgspec.Struct, frozen=True):
    peak_bytes: int  # the most bytes live on the device at once, resident ones included
    peak_step: int  # index of the step at which the peak is first reached
    time_us: float  # until the last computation or copy ends; without copies the sum of all costs
    overhead: float  # `time_us` over the time of computing every op once, minus one
    live_bytes: tuple[int, ...]  # one number a step: bytes live while it runs
    held_at_peak: tuple[str, ...]  # largest first, outputs of the op at the peak included
    workspace_at_peak_bytes: int
    clock_us: tuple[float, ...] = ()  # one number a step: the device's clock after it
    stalls: tuple[_Stall, ...] = ()  # waits for copies
    copies: tuple[Copy, ...] = ()  # in the order of their steps
    busy_us: dict[str, float] = {}  # by engine, time in which it works
    moved_bytes: dict[str, int] = {}  # by link
    host_peak_bytes: int = 0
    nvme_peak_bytes: int = 0
    below_bytes: dict[str, tuple[int, ...]] = {}  # by tier, after each step; empty where nothing is

    @property
    def stall_us(self) -> float:
        return self.time_us - self.busy_us.get("device", self.time_us)

    def __repr__(self) -> str:
        return (
            f"Simulation(peak {self.peak_bytes} bytes at step {self.peak_step}, "
            f"{self.time_us:.0f} us, overhead {100 * self.overhead:.2f} %)"
        )


# Bytes go by the order of the steps alone: a copy takes its room at `Offload` or `Fetch` and leaves
# it at `Free`, so no peak depends on how fast anything is. Each rule raises where it is broken.


class _Clocks:
    """When each step runs, in µs, by clocks that decide no byte: no wrong rate breaks a budget."""

    def __init__(self) -> None:
        self.now: dict[str, float] = dict.fromkeys(("device", "host", *LINK_NAMES), 0.0)
        self.busy = dict.fromkeys(self.now, 0.0)
        self.stalls, self.copies = list[_Stall](), list[Copy]()
        # By tier and value: when its copy is whole, and when the last that reads it ends.
        self.arrives: dict[tuple[Tier, str], float] = {}
        self.is_read_until: dict[tuple[Tier, str], float] = {}
        # Dropped below the device: when its readers end, and bytes.
        self.leaving: dict[Tier, list[tuple[float, int]]] = {"host": [], "nvme": []}
        self.left_bytes: dict[Tier, int] = dict.fromkeys(self.leaving, 0)

    def compute(self, step: int, at: Tier, op: Op, made: tuple[str, ...], room_us: float) -> None:
        for name in made if room_us else ():  # 0 on the device: there the order counts
            self._wait(step, at, name, room_us)
        for name in op.inputs:
            self._wait(step, at, name, self.arrives.get((at, name), 0.0))
        for name in op.updates:  # a write in place waits for copies that read the old value
            self._wait(step, at, name, self.is_read_until.get((at, name), 0.0))
        cost_us = op.cost_us if at == "device" else op.host_cost_us or 0.0
        self.now[at] += cost_us
        self.busy[at] += cost_us
        if at != "device":  # ops of the device run in order, and its copies wait for all of them
            for name in (*made, *op.updates):
                self.arrives[at, name] = self.now[at]
            for name in op.inputs:
                self._read(at, name, self.now[at])

    def copy(self, step: int, link: LinkName, took_us: float, name: str, size_bytes: int,
             source: Tier, to: Tier, room_us: float) -> None:  # fmt: skip
        start = max(self.now[link], self.arrives.get((source, name), 0.0), room_us)
        # As the copy's stream does for ops issued before it (`rewriter/tiers/stream_tier.py`).
        if "device" in (source, to):
            start = max(start, self.now["device"])
        self.now[link] = self.arrives[to, name] = start + took_us
        self.busy[link] += took_us
        self.copies.append(Copy(step, link, name, size_bytes, start, start + took_us))
        self._read(source, name, start + took_us)

    def drop(self, step: int, at: Tier, name: str, size_bytes: int) -> None:
        until = max(self.arrives.pop((at, name), 0.0), self.is_read_until.pop((at, name), 0.0))
        if at == "device":
            self._wait(step, at, name, until)  # the next op reuses this memory
        else:
            self.leaving[at].append((until, size_bytes))  # free in the books at once
            self.left_bytes[at] += size_bytes

    def room_us(self, tier: Tier, spare_bytes: float) -> float:
        """When a tier has room, where its books show `spare_bytes` beyond it."""
        # Dropped values take room until their readers end.
        short_bytes = self.left_bytes.get(tier, 0) - spare_bytes
        for until, size_bytes in sorted(self.leaving[tier]) if short_bytes > 0 else ():
            short_bytes -= size_bytes
            if short_bytes <= 0:
                return until
        return 0.0

    def _wait(self, step: int, engine: Tier, name: str, until: float) -> None:
        if until > self.now[engine]:
            self.stalls.append(_Stall(step, name, until - self.now[engine]))
            self.now[engine] = until

    def _read(self, tier: Tier, name: str, until: float) -> None:
        self.is_read_until[tier, name] = max(until, self.is_read_until.get((tier, name), 0.0))


class _Order:
    """The rules on which op may run when, whatever memory holds; `updated` has the op by parameter.
    First runs may come in any order that gives the same bits (`test_reordered.py`)."""

    def __init__(self, graph: TrainingGraph, schedule: Schedule) -> None:
        self.graph, self.asked = graph, recompute_globs(schedule)
        self.computed, self.updated = set[str](), dict[str, str]()
        self.forward_left = graph.n_forward
        self._ordered, self._due = set(graph.ordered_ops), iter(graph.ordered_ops)
        self._opening = {op.name for op in graph.ops if op.target == TANGENTS}

    def run(self, i: int, op: Op) -> bool:
        """Whether it is the first run; ScheduleError if it may not be now."""
        is_first = op.name not in self.computed
        if not (is_first or may_run_twice(op, self.asked)) and (op.no_recompute or op.updates):
            _refuse(i, f"op {op.name} must not run twice: {op.no_recompute or 'it updates'}")
        for value in op.inputs if self.updated else ():
            if update := self.updated.get(value):
                _refuse(i, f"op {op.name} reads {value}, which op {update} has updated")
        if op.phase == "backward" and self.forward_left:
            _refuse(i, f"backward op {op.name} runs before forward ends")
        if is_first:
            self._run_first(i, op)
        return is_first

    def _run_first(self, i: int, op: Op) -> None:
        # Random ops share one stream, ops with side effects share buffers.
        if op.name in self._ordered and op.name != (due := next(self._due)):
            _refuse(i, f"op {op.name} must first run after {due}, as captured")
        self.computed.add(op.name)
        if op.phase != "forward" and not self._opening <= self.computed:  # tangents open backward
            _refuse(i, f"op {op.name} runs before tangents")
        if op.target == UPDATE:
            given = (self.graph.value_by_name[name] for name in op.inputs)
            self.updated |= {v.name: op.name for v in given if not v.producer and v.home is None}
        self.forward_left -= op.phase == "forward"


def _refuse(i: int, message: str) -> NoReturn:
    raise ScheduleError(f"invalid schedule at step {i}: {message}")


class _ScheduleReplay:
    """One pass over a schedule; `live`, `bytes` and `peak_bytes` are by tier."""

    def __init__(self, graph: TrainingGraph, schedule: Schedule, links: Links | None) -> None:
        self.graph, self.links = graph, links
        self.order, self.clocks = _Order(graph, schedule), _Clocks()
        # Of the last op: its workspace, and all beside what was live before.
        self.workspace_bytes = self.beside_bytes = 0
        self._of_updates = workspaces_of_updates(graph, schedule)
        self.home: dict[str, Tier] = {v.name: v.home for v in graph.values if v.home}
        self.resident = {v.name for v in graph.values if not (v.producer or v.home)}
        # Resident values are left out: `Resident.total_bytes` has counted them.
        self.size = {v.name: v.size_bytes for v in graph.values if v.name not in self.resident}
        self.live: dict[Tier, dict[str, None]] = {"device": {}, "host": {}, "nvme": {}}
        self.bytes: dict[Tier, int] = {"device": graph.resident.total_bytes, "host": 0, "nvme": 0}
        self.peak_bytes = dict(self.bytes)
        for name, tier in self.home.items():  # they are there when the step begins
            self._add(0, tier, name)
        # The caller holds forward's outputs, but new values of buffers, which AOTAutograd copies.
        self.held = set(graph.forward_outputs) & set(graph.outputs)
        # Autograd's engine holds what it hands over, whatever copies there are.
        self.held |= {v.name for v in graph.values if v.kind == "tangent"}

    def step(self, i: int, step: Step) -> int:
        """Carry out one step; return the bytes live on the device while it ran."""
        before, self.workspace_bytes, self.beside_bytes = self.bytes["device"], 0, 0
        if isinstance(step, Compute):
            self._compute(i, step)
        elif isinstance(step, Free):
            self._drop(i, step.at, step.value)
        else:
            self._copy(i, step)
        # An output that was live already exists twice while the op runs.
        running = max(before + self.beside_bytes, self.bytes["device"])
        self.peak_bytes["device"] = max(self.peak_bytes["device"], running)
        return running

    def check_end(self, n_steps: int) -> None:
        for op in self.graph.ops:
            if op.name not in self.order.computed:
                _refuse(n_steps, f"op {op.name} is never computed")
        self._check_live(self.graph.outputs, n_steps, "the step ends")
        for name, tier in self.home.items():
            if name not in self.live[tier]:
                _refuse(n_steps, f"{name} must be on the {tier} when the step ends")

    def _compute(self, i: int, step: Compute) -> None:
        if step.op not in self.graph.op_index:
            _refuse(i, f"the graph has no op {step.op}")
        op, at = self.graph.ops[self.graph.op_index[step.op]], step.at
        is_first = self.order.run(i, op)
        self._check_inputs(i, op, at)
        fresh = tuple(value for value in op.outputs if value not in self.live[at])
        if not (is_first or fresh):
            _refuse(i, f"op {op.name} makes only values that are live already")
        if at == "device":
            self.workspace_bytes = self._of_updates.get(op.name, op.workspace_bytes)
            self.beside_bytes = self.workspace_bytes + sum(self.size[v] for v in op.outputs)
        room_us = max((self._add(i, at, value) for value in fresh), default=0.0)
        self.clocks.compute(i, at, op, fresh, room_us)
        for value in op.updates:  # copies of a rewritten value are stale
            for tier in TIERS:
                if tier != at and value in self.live[tier]:
                    self._remove(i, tier, value)
        if is_first and op.phase == "forward" and not self.order.forward_left:
            self._check_live(self.graph.forward_outputs, i, "forward ends")

    def _check_inputs(self, i: int, op: Op, at: Tier) -> None:
        if at != "device" and (at == "nvme" or op.host_cost_us is None):
            _refuse(i, f"op {op.name} cannot run on the {at}")
        live, resident = self.live[at], self.resident if at == "device" else ()
        for value in op.inputs:
            if value not in live and value not in resident:
                _refuse(i, f"op {op.name} reads {value}, which is not live on the {at}")

    def _copy(self, i: int, step: Offload | Fetch) -> None:
        name, source, to = step.value, step.source, step.to
        link = WAYS.get((source, to))
        way = self.links.link(link) if self.links and link else None
        if way is None or link is None:
            _refuse(i, f"{name} goes from {source} to {to}, and the graph has no such link: "
                    f"capture with {option('host')} (and {option('nvme')}), or solve "
                    "without")  # fmt: skip
        if name not in self.live[source] or name in self.live[to]:
            _refuse(i, f"{name} is not on the {source}, or already on the {to}: no copy")
        room_us, size_bytes = self._add(i, to, name), self.size[name]
        self.clocks.copy(i, link, way.us(size_bytes), name, size_bytes, source, to, room_us)

    def _drop(self, i: int, at: Tier, name: str) -> None:
        if name not in self.live[at]:
            _refuse(i, f"{name} is not live on the {at}, so it cannot be dropped")
        if at == "device" and self.order.forward_left == 0 and name in self.held:
            _refuse(i, f"{name} is held by the caller until the step ends")
        self._remove(i, at, name)

    def _add(self, i: int, tier: Tier, name: str) -> float:
        """Book a value; return when the tier has room for all that its books hold."""
        self.live[tier][name] = None
        self.bytes[tier] += self.size[name]
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.bytes[tier])
        if tier == "device" or self.links is None:  # solvers hold the device to a budget
            return 0.0
        spare = self.links.room_bytes(tier) - self.bytes[tier]
        if spare < 0:
            _refuse(i, f"the {tier} is full: {name} exceeds it by {exact_bytes_text(-spare)}")
        return self.clocks.room_us(tier, spare)

    def _remove(self, i: int, tier: Tier, name: str) -> None:
        self.clocks.drop(i, tier, name, self.size[name])
        del self.live[tier][name]
        self.bytes[tier] -= self.size[name]

    def _check_live(self, names: tuple[str, ...], i: int, when: str) -> None:
        for name in names:
            if not (name in self.live["device"] or name in self.resident or name in self.home):
                _refuse(i, f"{name} must be live when {when}")


def simulate(graph: TrainingGraph, schedule: Schedule, links: Links | None = None) -> Simulation:
    """Replay `schedule` over `graph` and check every rule.

    While an op runs, these are live: what is resident, every value that has not been freed, and the
    op's inputs, outputs and workspace. The second copy that a run makes of a live output counts
    only while the op runs. `links` may have other rates than those of `graph`. ScheduleError names
    the step and the op: made for another graph, or a rule is broken.
    """
    graph = graph_of_schedule(graph, schedule)
    schedule.check_made_for(graph)
    replay, steps = _ScheduleReplay(graph, schedule, links or graph.links), schedule.steps
    live_bytes, clock_us = list[int](), list[float]()
    below: dict[Tier, list[int]] = {tier: [] for tier in LOWER_TIERS}
    peak_bytes, peak_step, at_peak, workspace = replay.bytes["device"], 0, tuple[str, ...](), 0
    for i, step in enumerate(steps):
        live_bytes.append(replay.step(i, step))
        clock_us.append(replay.clocks.now["device"])
        for tier, bytes_there in below.items():
            bytes_there.append(replay.bytes[tier])
        if live_bytes[-1] > peak_bytes:
            peak_bytes, peak_step, at_peak = live_bytes[-1], i, tuple(replay.live["device"])
            workspace = replay.workspace_bytes
    replay.check_end(len(steps))
    time_us = max(replay.clocks.now.values())  # the last copy may end after the last op
    copies = tuple(replay.clocks.copies)
    return Simulation(
        peak_bytes=replay.peak_bytes["device"], peak_step=peak_step, time_us=time_us,
        overhead=overhead_of(time_us, graph.base_us), live_bytes=tuple(live_bytes),
        held_at_peak=tuple(sorted(at_peak, key=lambda name: -replay.size[name])),
        workspace_at_peak_bytes=workspace, clock_us=tuple(clock_us),
        stalls=tuple(replay.clocks.stalls), copies=copies, busy_us=replay.clocks.busy,
        moved_bytes={n: sum(c.size_bytes for c in copies if c.link == n) for n in LINK_NAMES},
        host_peak_bytes=replay.peak_bytes["host"], nvme_peak_bytes=replay.peak_bytes["nvme"],
        below_bytes={str(tier): tuple(each) for tier, each in below.items() if any(each)},
    )  # fmt: skip


def require_valid(
    graph: TrainingGraph, schedule: Schedule, links: Links | None = None
) -> Simulation:
    """As `simulate`, for the very `graph` that is to be carried out, with regions in chunks."""
    # `simulate` would accept the captured graph too. With steps doubled, dropped or moved since, a
    # schedule of the same hash would give other gradients, or take more memory.
    schedule.check_made_for(graph)
    return simulate(graph, schedule, links)


def overhead_of(time_us: float, base_us: float) -> float:
    """Of times of schedules, and of lower bounds on them; 0 or more."""
    return max(time_us / base_us - 1, 0.0) if base_us else 0.0  # a step without costs takes no time


def bound_of(lower_bound_us: float, base_us: float) -> float | None:
    """A lower bound as an overhead; None for a bound of 0 on a step that takes time: no bound."""
    return None if lower_bound_us <= 0 < base_us else overhead_of(lower_bound_us, base_us)


def gap_of(time_us: float, lower_bound_us: float) -> float | None:
    """None without a bound, which 0 stands for."""
    if lower_bound_us > 0:
        return time_us / lower_bound_us - 1
    return None if time_us > 0 else 0.0  # a step without time is the best there is
