"""What another thread writes while forward is traced is not put down to forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph

looks, rate = 0, 1.0
seen: list[int] = []
told, done = threading.Lock(), threading.Lock()
"""Held until forward lets the thread write, and until it has written: no code of Python's runs."""


def report() -> str:
    return f"{looks} looks, {seen}"


def count() -> None:
    global looks
    looks += 1


def collect() -> None:
    seen.append(len(seen))


def change_rate() -> None:
    global rate
    rate += 1.0


class Watched(nn.Module):
    """Another thread writes while its forward runs. It reports only what is never asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        told.release()
        done.acquire()
        if x.dim() == 5:
            print(report())
        return self.linear(x)


class Reading(Watched):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * rate


class Counting(Watched):
    def forward(self, x: Tensor) -> Tensor:
        count()
        return super().forward(x)


@pytest.fixture
def writing() -> Generator[list[Callable[[], None]]]:
    """What the thread does when forward lets it; it ends with the test."""
    told.acquire()
    done.acquire()
    to_do: list[Callable[[], None]] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            if told.acquire(timeout=0.01):
                for write in to_do:
                    write()
                done.release()

    thread = threading.Thread(target=run, name="monitor")
    thread.start()
    yield to_do
    ended.set()
    thread.join()
    for lock in (told, done):
        lock.acquire(blocking=False)
        lock.release()


def captured(model: nn.Module) -> TrainingGraph:
    return remat.capture(model, (torch.randn(2, 4),))


@pytest.mark.parametrize("write", [count, collect])
def test_a_thread_may_write_what_forward_does_not_read(
    writing: list[Callable[[], None]], write: Callable[[], None]
) -> None:
    before = looks + len(seen)
    writing.append(write)
    assert captured(Watched()).n_forward
    written = looks + len(seen) - before
    assert written >= 1  # nor is what it wrote put back
    model = Watched()
    planned = remat.rematerialize(model, (torch.randn(2, 4),), budget="min", check=False)
    told.release()
    done.acquire()
    planned(torch.randn(2, 4)).sum().backward()


def test_a_thread_is_named_where_forward_reads_what_it_writes(
    writing: list[Callable[[], None]],
) -> None:
    writing.append(change_rate)
    with pytest.raises(CaptureError, match=r"the other thread \(.*monitor.*\) .* changes .*rate"):
        captured(Reading())


def test_what_forward_writes_is_still_its_own(writing: list[Callable[[], None]]) -> None:
    writing.append(collect)
    with pytest.raises(
        CaptureError, match=r"(?s)change .*looks.* outside forward.*Forward of Counting changes"
    ):
        captured(Counting())
