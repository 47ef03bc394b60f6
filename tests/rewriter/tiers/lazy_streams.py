"""Streams without a device: what is queued runs as late and as oddly as events allow."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.rewriter.tiers import stream_tier

Work = Callable[[], Any]


class LazyEvent:
    """Passed once its stream has come to it."""

    def __init__(self, machine: LazyMachine) -> None:
        self.machine, self.is_passed = machine, False

    def synchronize(self) -> None:
        self.machine.run(lambda: self.is_passed)


class LazyStream:
    """A queue of work, and of events to wait for or to pass."""

    def __init__(self, machine: LazyMachine) -> None:
        self.machine = machine
        self.queue: deque[tuple[str, Any]] = deque()
        machine.streams.append(self)

    def put(self, work: Work) -> None:
        self.queue.append(("work", work))

    def wait_event(self, event: LazyEvent) -> None:
        self.queue.append(("wait", event))

    def record_event(self) -> LazyEvent:
        event = LazyEvent(self.machine)
        self.queue.append(("pass", event))
        return event

    @property
    def is_ready(self) -> bool:
        if not self.queue:
            return False
        kind, what = self.queue[0]
        return kind != "wait" or what.is_passed

    def step(self) -> None:
        kind, what = self.queue.popleft()
        if kind == "work":
            what()
        elif kind == "pass":
            what.is_passed = True


class LazyMachine:
    """Streams that run only when somebody waits for them.

    Attributes
    ----------
    computing : the stream that `torch.cuda.current_stream` gives. eager : all runs at once.
    free : blocks of device memory that are given out again, as they are.
    """

    def __init__(self, seed: int = 0, *, eager: bool = False) -> None:
        self.drawn, self.eager = random.Random(seed), eager
        self.streams: list[LazyStream] = []
        self.sides: dict[str, LazyStream] = {}
        self.free: list[Tensor] = []
        self.ranges = 0
        self._one_at_a_time = threading.RLock()
        self.computing = LazyStream(self)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        with self._one_at_a_time:
            while not until():
                ready = [stream for stream in self.streams if stream.is_ready]
                if not ready:
                    break
                self.drawn.choice(ready).step()
            assert until() or not any(stream.queue for stream in self.streams), "streams wait"

    def side(self, device: str, link: str) -> LazyStream:
        if link not in self.sides:
            self.sides[link] = LazyStream(self)
        return self.sides[link]

    def queue_copy(self, way: LazyStream, target: Tensor, source: Tensor) -> None:
        way.put(lambda: target.copy_(source))
        if self.eager:
            self.run()

    def taken(self, size_bytes: int, device: torch.device) -> Tensor:
        for i, block in enumerate(self.free):
            if block.nbytes == size_bytes:
                return self.free.pop(i)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pinned(self, size_bytes: int) -> Tensor:
        self.ranges += 1
        return torch.empty(size_bytes, dtype=torch.uint8)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let a `StreamTier` for "cpu" run here."""
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.computing)
        patch.setattr(stream_tier, "side_stream", self.side)
        patch.setattr(stream_tier, "queue_copy", self.queue_copy)
        patch.setattr(stream_tier, "compute_memory", self.taken)
        patch.setattr(stream_tier, "pinned", self.pinned)
