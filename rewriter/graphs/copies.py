"""Emits copies between tiers as nodes of the two graphs.

``h = offload(x)`` begins a copy out; ``h = leave(h, x)`` is the last to read x; ``p = fetch(h)``
takes memory and begins a copy back; ``x = arrive(p)`` stands before the first reader. ``write`` and
``read`` copy between host and NVMe. Whole storages are copied. A handle is a tensor, which forward
saves. What is fetched in forward has arrived when forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.graph import Op
from remat.graph_capture.graph import Tier as TierName
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import draws_randomness
from remat.rewriter.graphs.eager import RNG_STATE, EagerEmitter
from remat.rewriter.graphs.emitter import Demanded, LowerTierCopy
from remat.rewriter.tiers.file_tier import HANDLE_BYTES, TierCopies
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step

# Sums in place and noted random states are whole after the last write: earlier copies wait.

_WritesOf = Callable[[str], tuple[str, ...]]  # what an op's first run also writes to


@dataclass
class CopyTimes:
    """Which copies out of the device begin later than a schedule has it: indices of their steps."""

    delayed: set[int] = field(default_factory=set[int])
    after_write: dict[int, list[tuple[str, int]]] = field(default_factory=lambda: {})


def copy_times(schedule: Schedule, writes_of: _WritesOf) -> CopyTimes:
    times, writes = CopyTimes(), _writes(schedule, writes_of)
    touches: dict[str, list[tuple[int, Step]]] = {}
    for i, step in enumerate(schedule.steps):
        if not isinstance(step, Compute) and step.value in writes:
            touches.setdefault(step.value, []).append((i, step))
    for value, steps in touches.items():
        copied_at = -1  # once the value has left the device, a write no longer reaches its copy
        for i, step in steps:
            if isinstance(step, Offload) and step.to == "host":
                later = [at for at in writes[value] if i < at < _end_of_stay(steps, i)]
                copied_at = max([i, *later])
                if later:
                    if any(i < touched < later[-1] for touched, _ in steps):
                        raise _stale(value)
                    times.delayed.add(i)
                    times.after_write.setdefault(later[-1], []).append((value, i))
            if isinstance(step, Fetch) and any(copied_at < at < i for at in writes[value]):
                raise _stale(value)
    return times


def _writes(schedule: Schedule, writes_of: _WritesOf) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    ran: set[str] = set()
    for i, step in enumerate(schedule.steps):
        if isinstance(step, Compute) and step.op not in ran:  # only a first run adds or notes
            ran.add(step.op)
            for value in writes_of(step.op):
                found.setdefault(value, []).append(i)
    return found


def _end_of_stay(steps: list[tuple[int, Step]], begun: int) -> float:
    ends = (i for i, one in steps if i > begun and isinstance(one, Free) and one.at == "device")
    return next(ends, float("inf"))


def _stale(value: str) -> RewriteError:
    return RewriteError(
        f"copy {value} later, or solve without offloading: the schedule copies it to the host "
        "before an op writes to it in place, and reads the copy after that"
    )


@dataclass
class CopyContext:
    """What the emitters of both graphs share; `leaving` may still be read by a copy out."""

    tier: TierCopies
    times: CopyTimes
    leaving: dict[str, None] = field(default_factory=dict[str, None])


class CopyEmitter(EagerEmitter):
    """Emits a graph with copies; `handles` are below the device, `pending` on their way back."""

    def __init__(self, moving: CopyContext, *given: Any) -> None:
        super().__init__(*given)
        self.moving = moving
        self.handles: dict[LowerTierCopy, fx.Node] = {}
        self.pending: dict[str, fx.Node] = {}
        self.leaving: dict[str, fx.Node] = {}  # its host copy may go first, on to NVMe

    def move(self, step: Offload | Fetch) -> None:
        # Nothing reads other values, or they stand for a write in place.
        if step.value not in self.joint.base_of_value and not self.is_saved_state(step.value):
            return
        if isinstance(step, Offload):
            if step.to == "nvme":
                self._below(step.value, "host", "nvme", "write")
            elif self.at not in self.moving.times.delayed:  # else it begins after the last write
                self._offload(step.value, self.at)
        elif step.to == "host":
            self._below(step.value, "nvme", "host", "read", self._place(self.at))
        else:
            handle = self._handle(LowerTierCopy(step.value, "host"))
            self.pending[step.value] = self._call("fetch", (handle,), f"{step.value}_fetch")

    def drop(self, step: Free) -> None:
        if step.at != "device":
            self.handles.pop(LowerTierCopy(step.value, step.at), None)
            return
        self._arrive(step.value)  # no copy may read or write the memory that is dropped
        self._leave(step.value)
        self.free(step.value)

    def compute(self, op: Op) -> None:
        for value in (*op.inputs, *op.outputs):
            self._arrive(value)
        super().compute(op)
        for value, begun_at in self.moving.times.after_write.get(self.at, ()):
            self._offload(value, begun_at)

    def resolve(self, node: fx.Node) -> fx.Node:
        if self.pending and node not in self.copies:
            self._arrive(self.joint.value_of_node.get(node, ""))
        return super().resolve(node)

    def kept(self, what: Demanded) -> fx.Node:
        if isinstance(what, LowerTierCopy):
            return self.handles.get(what) or self.leaving[what.value]
        if isinstance(what, str):
            self._arrive(what)
        return super().kept(what)

    def results(self, results: Iterable[Any]) -> list[Any]:
        found = super().results(results)
        for value in self.joint.graph.outputs:  # the caller may write to it after the step
            self._leave(value)
        return found

    def _offload(self, value: str, begun_at: int) -> None:
        args = self._tensor(value), self._place(begun_at)
        self.leaving[value] = self._call("offload", args, f"{value}_host")
        self._keep(LowerTierCopy(value, "host"), self.leaving[value])
        self.moving.leaving[value] = None

    def _below(self, value: str, source: TierName, to: TierName, function: str, *at: int) -> None:
        handle = self._handle(LowerTierCopy(value, source))
        made = self._call(function, (handle, *at), f"{value}_{to}")
        self._keep(LowerTierCopy(value, to), made)

    def _leave(self, value: str) -> None:
        if value not in self.moving.leaving:
            return
        del self.moving.leaving[value]
        key = LowerTierCopy(value, "host")
        handle = self.leaving.pop(value, None) or self._handle(key)  # forward may have begun it
        left = self._call("leave", (handle, self._tensor(value)), f"{value}_left")
        left.meta = dict(handle.meta)  # it stands for the handle from now on
        if self.handles.get(key) is handle:
            self.handles[key] = left

    def _arrive(self, value: str) -> None:
        if value not in self.pending:
            return
        back = self._call("arrive", (self.pending.pop(value),), f"{value}_back")
        if (base := self.joint.base_of_value.get(value)) is None:
            back.meta["val"] = self.fake_state(value)
            self.states[value] = back
        else:
            back.meta = dict(base.meta)
            self.put(base, back)

    def _tensor(self, value: str) -> fx.Node:
        if (base := self.joint.base_of_value.get(value)) is not None:
            return self.resolve(self.joint.in_place.last(base))
        if value not in self.states:
            self.states[value] = self.bring(value)
        return self.states[value]

    def _handle(self, key: LowerTierCopy) -> fx.Node:
        if key not in self.handles:
            self.handles[key] = self.bring(key)
        return self.handles[key]

    def _keep(self, key: LowerTierCopy, handle: fx.Node) -> None:
        base = self.joint.base_of_value.get(key.value)
        like: Any = self.fake_state(key.value) if base is None else base.meta["val"]
        with like.fake_mode:
            handle.meta["val"] = torch.empty(HANDLE_BYTES, dtype=torch.uint8)
        self.handles[key] = handle

    def _place(self, begun_at: int) -> int:
        return self.moving.tier.places.of_step(begun_at)

    def _call(self, function: str, args: tuple[Any, ...], name: str) -> fx.Node:
        target = getattr(self.moving.tier, function)
        return self.graph.create_node("call_function", target, args, {}, name)


def written_by(joint: Joint, op: str) -> tuple[str, ...]:
    if (node := joint.node_of_op.get(op)) is None:
        return ()
    # A sum that it adds to; below, the state that it draws from.
    written = (joint.value_of_node[node],) if node in joint.in_place.targets else ()
    return (*written, f"{RNG_STATE}{op}") if draws_randomness(node) else written
