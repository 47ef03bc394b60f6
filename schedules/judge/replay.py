"""The bytes that a schedule holds in each tier, step by step.

Bytes go by the order of the steps alone. A copy takes its room where `Offload` or `Fetch` stands,
and leaves it where `Free` stands, so no peak depends on how fast anything is. Each rule raises
where it is broken. The rules of order stand in `order.py`, the clocks in `clocks.py`.
"""

from __future__ import annotations

from remat.graph_capture.errors import option
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.links import TIERS, WAYS, Links, Tier
from remat.schedules.judge.clocks import Clocks
from remat.schedules.judge.order import Order, refuse
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.update_workspaces import workspaces_of_updates


class Replay:
    """One pass over a schedule.

    Attributes
    ----------
    live : by tier, the values that it holds. bytes, peak_bytes : by tier, now and at most.
    workspace_bytes : of the op of the last step. beside_bytes : all that its op took on the device
        while it ran, beside what was live before it.
    """

    def __init__(self, graph: TrainingGraph, schedule: Schedule, links: Links | None) -> None:
        self.graph, self.links = graph, links
        self.order, self.clocks = Order(graph, schedule), Clocks()
        self.workspace_bytes = self.beside_bytes = 0
        self._of_updates = workspaces_of_updates(graph, schedule)
        self.home: dict[str, Tier] = {v.name: v.home for v in graph.values if v.home}
        self.resident = {v.name for v in graph.values if not (v.producer or v.home)}
        self.size = {v.name: v.size_bytes for v in graph.values if v.name not in self.resident}
        self.live: dict[Tier, dict[str, None]] = {"device": {}, "host": {}, "nvme": {}}
        self.bytes: dict[Tier, int] = {"device": graph.resident.total_bytes, "host": 0, "nvme": 0}
        self.peak_bytes = dict(self.bytes)
        for name, tier in self.home.items():
            self._add(0, tier, name)
        # The caller holds outputs of forward until the step ends. New values of buffers are outputs
        # of forward alone: AOTAutograd copies them into the buffers as forward ends.
        self.held = set(graph.forward_outputs) & set(graph.outputs)
        # Autograd's engine holds what it hands over, so no copy of it elsewhere frees anything.
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
        running = max(before + self.beside_bytes, self.bytes["device"])
        self.peak_bytes["device"] = max(self.peak_bytes["device"], running)
        return running

    def check_end(self, n_steps: int) -> None:
        """Raise `ScheduleError` unless the step is whole."""
        for op in self.graph.ops:
            if op.name not in self.order.computed:
                refuse(n_steps, f"op {op.name} is never computed")
        self._check_live(self.graph.outputs, n_steps, "the step ends")
        for name, tier in self.home.items():
            if name not in self.live[tier]:
                refuse(n_steps, f"{name} must be on the {tier} when the step ends")

    def _compute(self, i: int, step: Compute) -> None:
        if step.op not in self.graph.op_index:
            refuse(i, f"the graph has no op {step.op}")
        op, at = self.graph.ops[self.graph.op_index[step.op]], step.at
        is_first = self.order.run(i, op)
        self._check_inputs(i, op, at)
        fresh = tuple(value for value in op.outputs if value not in self.live[at])
        if not (is_first or fresh):
            refuse(i, f"op {op.name} makes nothing that is not live")
        if at == "device":
            self.workspace_bytes = self._of_updates.get(op.name, op.workspace_bytes)
            self.beside_bytes = self.workspace_bytes + sum(self.size[v] for v in op.outputs)
        room_us = max((self._add(i, at, value) for value in fresh), default=0.0)
        self.clocks.compute(i, at, op, fresh, room_us)
        # Copies of a value that was rewritten are old.
        for value in op.updates:
            for tier in TIERS:
                if tier != at and value in self.live[tier]:
                    self._remove(i, tier, value)
        if is_first and op.phase == "forward" and not self.order.forward_left:
            self._check_live(self.graph.forward_outputs, i, "forward ends")

    def _check_inputs(self, i: int, op: Op, at: Tier) -> None:
        if at != "device" and (at == "nvme" or op.host_cost_us is None):
            refuse(i, f"op {op.name} cannot run on the {at}")
        live, resident = self.live[at], self.resident if at == "device" else ()
        for value in op.inputs:
            if value not in live and value not in resident:
                refuse(i, f"op {op.name} reads {value}, which is not live on the {at}")

    def _copy(self, i: int, step: Offload | Fetch) -> None:
        name, source, to = step.value, step.source, step.to
        link = WAYS.get((source, to))
        way = self.links.link(link) if self.links and link else None
        if way is None or link is None:
            refuse(i, f"{name} goes from {source} to {to}, and the graph has no such link: "
                    f"capture with {option('host')} (and {option('nvme')}), or solve "
                    "without")  # fmt: skip
        if name not in self.live[source] or name in self.live[to]:
            refuse(i, f"{name} is not on the {source}, or is on the {to} already: no copy")
        room_us, size_bytes = self._add(i, to, name), self.size[name]
        self.clocks.copy(i, link, way.us(size_bytes), name, size_bytes, source, to, room_us)

    def _drop(self, i: int, at: Tier, name: str) -> None:
        if name not in self.live[at]:
            refuse(i, f"{name} is not live on the {at}, so it cannot be dropped")
        if at == "device" and self.order.forward_left == 0 and name in self.held:
            refuse(i, f"{name} is in the caller's hands until the step ends")
        self._remove(i, at, name)

    def _add(self, i: int, tier: Tier, name: str) -> float:
        """Book a value; return when the tier really has room for all that its books hold."""
        self.live[tier][name] = None
        self.bytes[tier] += self.size[name]
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.bytes[tier])
        if tier == "device" or self.links is None:
            return 0.0
        spare = self.links.room_bytes(tier) - self.bytes[tier]
        if spare < 0:
            refuse(i, f"the {tier} is full: {name} is {-spare} bytes too many")
        return self.clocks.room_us(tier, spare)

    def _remove(self, i: int, tier: Tier, name: str) -> None:
        self.clocks.drop(i, tier, name, self.size[name])
        del self.live[tier][name]
        self.bytes[tier] -= self.size[name]

    def _check_live(self, names: tuple[str, ...], i: int, when: str) -> None:
        for name in names:
            if not (name in self.live["device"] or name in self.resident or name in self.home):
                refuse(i, f"{name} must be live when {when}")
