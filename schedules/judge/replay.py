"""The bytes that a schedule holds in each tier, step by step.

Bytes go by the order of the steps alone. A copy takes its room where `Offload` or `Fetch` stands,
and leaves it where `Free` stands, so no peak depends on how fast anything is. Each rule raises
where it is broken. The rules of order stand in `order.py`, the clocks in `clocks.py`.
"""

from __future__ import annotations

from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.links import LinkName, Links, Tier
from remat.schedules.judge.clocks import Clocks
from remat.schedules.judge.order import Order, refuse
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.update_workspaces import workspaces_of_updates

Route = tuple[Tier, LinkName]
OFFLOADS: dict[Tier, Route] = {"host": ("device", "d2h"), "nvme": ("host", "write")}
"""From the target of an offload to its source and its link."""
FETCHES: dict[Tier, Route] = {"device": ("host", "h2d"), "host": ("nvme", "read")}


class Replay:
    """One pass over a schedule.

    Attributes
    ----------
    live : by tier, the values that it holds. bytes, peak_bytes : by tier, now and at most.
    """

    def __init__(self, graph: TrainingGraph, schedule: Schedule, links: Links | None) -> None:
        self.graph, self.links = graph, links
        self.order, self.clocks = Order(graph, schedule), Clocks()
        self.update_workspaces = workspaces_of_updates(graph, schedule)
        given = [v for v in graph.values if not v.producer]
        self.home: dict[str, Tier] = {v.name: v.home for v in given if v.home}
        self.resident = {v.name for v in given if not v.home}
        self.size = {v.name: v.size_bytes for v in graph.values if v.name not in self.resident}
        self.live: dict[Tier, dict[str, None]] = {"device": {}, "host": {}, "nvme": {}}
        self.bytes: dict[Tier, int] = {"device": graph.resident.total_bytes, "host": 0, "nvme": 0}
        self.peak_bytes = dict(self.bytes)
        for name, tier in self.home.items():
            self._add(tier, name)
            self._room_us(0, tier, name)
        # The caller holds outputs of forward until the step ends. New values of buffers are outputs
        # of forward alone: AOTAutograd copies them into the buffers as forward ends.
        self.held = set(graph.forward_outputs) & set(graph.outputs)
        # Autograd's engine holds what it hands over, so no copy of it elsewhere frees anything.
        self.held |= {v.name for v in graph.values if v.kind == "tangent"}

    def step(self, i: int, step: Step) -> int:
        """Carry out one step; return the bytes live on the device while it ran."""
        if isinstance(step, Compute):
            running = self._compute(i, step)
        elif isinstance(step, Free):
            running = self.bytes["device"]
            self._drop(i, step.at, step.value)
        else:
            running = self._copy(i, step)
        self.peak_bytes["device"] = max(self.peak_bytes["device"], running)
        return running

    def op_of(self, i: int, name: str) -> Op:
        """The op of that name."""
        index = self.graph.op_index.get(name)
        if index is None:
            refuse(i, f"the graph has no op {name}")
        return self.graph.ops[index]

    def workspace_bytes(self, op: Op) -> int:
        """What a run takes beside inputs and outputs."""
        return self.update_workspaces.get(op.name, op.workspace_bytes)

    def check_end(self, n_steps: int) -> None:
        """Raise `ScheduleError` unless the step is whole."""
        for op in self.graph.ops:
            if op.name not in self.order.computed:
                refuse(n_steps, f"op {op.name} is never computed")
        self._check_live(self.graph.outputs, n_steps, "the step ends")
        for name, tier in self.home.items():
            if name not in self.live[tier]:
                refuse(n_steps, f"{name} must be on the {tier} when the step ends")

    def _compute(self, i: int, step: Compute) -> int:
        op, at, live = self.op_of(i, step.op), step.at, self.live[step.at]
        self.order.check(i, op)
        self._check_inputs(i, op, at)
        fresh = tuple(value for value in op.outputs if value not in live)
        if op.name in self.order.computed and not fresh:
            refuse(i, f"op {op.name} makes nothing that is not live")
        running = self.bytes["device"]
        if at == "device":
            running += self.workspace_bytes(op) + sum(self.size[v] for v in op.outputs)
        for value in fresh:
            self._add(at, value)
        room_us = self._room_us(i, at, ", ".join(fresh))
        cost_us = op.cost_us if at == "device" else op.host_cost_us or 0.0
        self.clocks.compute(i, at, cost_us, op.inputs, fresh, op.updates, room_us)
        for value in op.updates:
            self._drop_stale(i, at, value)
        if self.order.ran(i, op):
            self._check_live(self.graph.forward_outputs, i, "forward ends")
        return running

    def _check_inputs(self, i: int, op: Op, at: Tier) -> None:
        if at != "device" and (at == "nvme" or op.host_cost_us is None):
            refuse(i, f"op {op.name} cannot run on the {at}")
        live, resident = self.live[at], self.resident if at == "device" else ()
        for value in op.inputs:
            if value not in live and value not in resident:
                where = "" if at == "device" else f" on the {at}"
                refuse(i, f"op {op.name} reads {value}, which is not live{where}")

    def _copy(self, i: int, step: Offload | Fetch) -> int:
        route = (OFFLOADS if isinstance(step, Offload) else FETCHES).get(step.to)
        name, to = step.value, step.to
        if route is None:
            refuse(i, f"no copy goes that way to the {to}")
        source, link = route
        way = self.links.link(link) if self.links else None
        if way is None:
            refuse(i, f"{name} goes from {source} to {to}, and the graph has no such link: "
                    "capture with host= (and nvme=), or solve without")  # fmt: skip
        if name not in self.live[source] or name in self.live[to]:
            refuse(i, f"{name} is not on the {source}, or is on the {to} already: no copy")
        self._add(to, name)
        room_us, size_bytes = self._room_us(i, to, name), self.size[name]
        self.clocks.copy(i, link, way.us(size_bytes), name, size_bytes, source, to, room_us)
        return self.bytes["device"]

    def _room_us(self, i: int, tier: Tier, what: str) -> float:
        """When a tier really has room for all that its books hold, `what` being the last of it."""
        if tier == "device" or self.links is None:
            return 0.0
        spare = self.links.room_bytes(tier) - self.bytes[tier]
        if spare < 0:
            refuse(i, f"the {tier} is full: {what} is {-spare} bytes too many")
        return self.clocks.room_us(tier, spare)

    def _drop(self, i: int, at: Tier, name: str) -> None:
        if name not in self.live[at]:
            where = "live" if at == "device" else f"on the {at}"
            refuse(i, f"{name} is not {where}, so it cannot be dropped")
        if at == "device" and self.order.forward_left == 0 and name in self.held:
            refuse(i, f"{name} is in the caller's hands until the step ends")
        self.clocks.drop(i, at, name, self.size[name])
        self._remove(at, name)

    def _drop_stale(self, i: int, at: Tier, name: str) -> None:
        """Drop what copies of a value were before it was rewritten at a tier."""
        for tier in self.live:
            if tier != at and name in self.live[tier]:
                self.clocks.drop(i, tier, name, self.size[name])
                self._remove(tier, name)

    def _add(self, tier: Tier, name: str) -> None:
        self.live[tier][name] = None
        self.bytes[tier] += self.size[name]
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.bytes[tier])

    def _remove(self, tier: Tier, name: str) -> None:
        del self.live[tier][name]
        self.bytes[tier] -= self.size[name]

    def _check_live(self, names: tuple[str, ...], i: int, when: str) -> None:
        for name in names:
            if not (name in self.live["device"] or name in self.resident or name in self.home):
                refuse(i, f"{name} must be live when {when}")
