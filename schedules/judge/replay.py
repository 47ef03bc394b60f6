"""The rules of a schedule, step by step, and the bytes that it holds in each tier.

Bytes go by the order of the steps alone. A copy takes its room where `Offload` or `Fetch` stands,
and leaves it where `Free` stands, so no peak depends on how fast anything is. Each rule raises
where it is broken. The clocks run beside it.
"""

from __future__ import annotations

from typing import NoReturn

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import UPDATE, Op, TrainingGraph
from remat.graph_capture.links import LinkName, Links, Tier
from remat.schedules.judge.clocks import Clocks
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.update_workspaces import workspaces_of_updates
from remat.schedules.verdicts.globs import asked_again, is_freed

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
        self.asked, self.clocks = asked_again(schedule), Clocks(links)
        self.update_workspaces = workspaces_of_updates(graph, schedule)
        self.home: dict[str, Tier] = {
            v.name: v.home for v in graph.values if not v.producer and v.home is not None
        }
        self.resident = {v.name for v in graph.values if not v.producer} - self.home.keys()
        self.size = {v.name: v.size_bytes for v in graph.values if v.name not in self.resident}
        self.live: dict[Tier, dict[str, None]] = {"device": {}, "host": {}, "nvme": {}}
        self.bytes: dict[Tier, int] = {"device": graph.resident.total_bytes, "host": 0, "nvme": 0}
        self.peak_bytes = dict(self.bytes)
        for name, tier in self.home.items():
            self._add(tier, name)
            self._room_us(0, tier, name)
        self.computed: set[str] = set()
        self.forward_left = graph.n_forward
        # The caller holds outputs of forward until the step ends. New values of buffers are outputs
        # of forward alone: AOTAutograd copies them into the buffers as forward ends.
        self.held = set(graph.forward_outputs) & set(graph.outputs)
        # Autograd's engine holds what it hands over, so no copy of it elsewhere frees anything.
        self.held |= {v.name for v in graph.values if v.kind == "tangent"}
        self.rank = {name: i for i, name in enumerate(graph.ordered_ops)}
        self.ordered_done = 0
        self.updated: dict[str, str] = {}
        self.opening = {op.name for op in graph.ops if op.target == "remat.tangents"}

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
            _refuse(i, f"the graph has no op {name}")
        return self.graph.ops[index]

    def workspace_bytes(self, op: Op) -> int:
        """What a run takes beside inputs and outputs."""
        return self.update_workspaces.get(op.name, op.workspace_bytes)

    def check_end(self, n_steps: int) -> None:
        """Raise `ScheduleError` unless the step is whole."""
        for op in self.graph.ops:
            if op.name not in self.computed:
                _refuse(n_steps, f"op {op.name} is never computed")
        self._check_live(self.graph.outputs, n_steps, "the step ends")
        for name, tier in self.home.items():
            if name not in self.live[tier]:
                _refuse(n_steps, f"{name} must be on the {tier} when the step ends")

    def _compute(self, i: int, step: Compute) -> int:
        op, live = self.op_of(i, step.op), self.live[step.at]
        self._check_may_run(i, op, step.at)
        fresh = tuple(value for value in op.outputs if value not in live)
        again = op.name in self.computed
        if again and not fresh:
            _refuse(i, f"op {op.name} makes nothing that is not live")
        cost_us = op.cost_us if step.at == "device" else op.host_cost_us
        assert cost_us is not None
        running = self.bytes["device"]
        if step.at == "device":
            running += self.workspace_bytes(op) + sum(self.size[v] for v in op.outputs)
        for value in fresh:
            self._add(step.at, value)
        room_us = 0.0 if step.at == "device" else self._room_us(i, step.at, ", ".join(fresh))
        self.clocks.compute(i, step.at, cost_us, op.inputs, fresh, op.updates, room_us)
        for value in op.updates:
            self._drop_stale(i, step.at, value)
        if not again:
            self._check_order(i, op)
        self.computed.add(op.name)
        self._pass_end_of_forward(i, op, again)
        return running

    def _check_may_run(self, i: int, op: Op, at: Tier) -> None:
        is_barred = op.name in self.computed and (op.pinned or op.updates)
        if is_barred and not is_freed(op, self.asked):
            _refuse(i, f"op {op.name} must not run twice: {op.pinned or 'it updates'}")
        if at != "device" and (at == "nvme" or op.host_cost_us is None):
            _refuse(i, f"op {op.name} cannot run on the {at}")
        live, resident = self.live[at], self.resident if at == "device" else ()
        for value in op.inputs:
            if value not in live and value not in resident:
                where = "" if at == "device" else f" on the {at}"
                _refuse(i, f"op {op.name} reads {value}, which is not live{where}")
            if value in self.updated:
                by = self.updated[value]
                _refuse(i, f"op {op.name} reads {value}, which op {by} has updated")
        if op.target == UPDATE:
            self.updated |= {value: op.name for value in op.inputs if value in self.resident}

    def _pass_end_of_forward(self, i: int, op: Op, again: bool) -> None:
        if not again and op.phase == "forward":
            self.forward_left -= 1
            if self.forward_left == 0:
                self._check_live(self.graph.forward_outputs, i, "forward ends")
        elif op.phase == "backward" and self.forward_left:
            _refuse(i, f"backward op {op.name} runs before forward ends")

    def _check_order(self, i: int, op: Op) -> None:
        """First runs may come in any order that gives the same bits.

        Ops that draw share one random stream, and ops with effects share the buffers: these keep
        their captured order. `remat.tangents` opens backward.
        `tests/rewriter/test_reordered.py` trains random orders against eager.
        """
        if op.name in self.rank:
            due = self.graph.ordered_ops[self.ordered_done]
            if op.name != due:
                _refuse(i, f"op {op.name} must first run after {due}, as captured")
            self.ordered_done += 1
        is_opened = self.opening <= self.computed or op.name in self.opening
        if op.phase != "forward" and not is_opened:
            _refuse(i, f"op {op.name} runs before tangents")

    def _copy(self, i: int, step: Offload | Fetch) -> int:
        route = (OFFLOADS if isinstance(step, Offload) else FETCHES).get(step.to)
        name, to = step.value, step.to
        if route is None:
            _refuse(i, f"no copy goes that way to the {to}")
        source, link = route
        if self.links is None or self.links.link(link) is None:
            _refuse(i, f"{name} goes from {source} to {to}, and the graph has no such link: "
                    "capture with host= (and nvme=), or solve without")  # fmt: skip
        if name not in self.live[source] or name in self.live[to]:
            _refuse(i, f"{name} is not on the {source}, or is on the {to} already: no copy")
        self._add(to, name)
        room_us = self._room_us(i, to, name)
        self.clocks.copy(i, link, name, self.size[name], source, to, room_us)
        return self.bytes["device"]

    def _room_us(self, i: int, tier: Tier, what: str) -> float:
        """When a tier really has room for all that its books hold, `what` being the last of it."""
        if tier == "device" or self.links is None:
            return 0.0
        spare = self.links.room_bytes(tier) - self.bytes[tier]
        if spare < 0:
            _refuse(i, f"the {tier} is full: {what} is {-spare} bytes too many")
        return self.clocks.room_us(tier, spare)

    def _drop(self, i: int, at: Tier, name: str) -> None:
        if name not in self.live[at]:
            where = "live" if at == "device" else f"on the {at}"
            _refuse(i, f"{name} is not {where}, so it cannot be dropped")
        if at == "device" and self.forward_left == 0 and name in self.held:
            _refuse(i, f"{name} is in the caller's hands until the step ends")
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
                _refuse(i, f"{name} must be live when {when}")


def _refuse(i: int, message: str) -> NoReturn:
    raise ScheduleError(f"invalid schedule at step {i}: {message}")
