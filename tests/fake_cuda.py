"""`torch.cuda` as far as remat calls it, with counters in place of a device.

Nothing here runs on a GPU: what runs, runs on the CPU, and what is counted is what a test sets.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.graph_capture import refusals
from remat.graph_capture.costs import op_costs
from remat.graph_capture.devices.cuda import CudaMeter
from remat.graph_capture.tracing import signature

TITLE = "NVIDIA H100 80GB HBM3"
L2_BYTES = LIBRARY_BYTES = 4096
PROPERTIES = SimpleNamespace(
    L2_cache_size=L2_BYTES, total_memory=85 * 10**9, major=9, minor=0, uuid="12345"
)


class FakeCuda:
    """The state of the device that is not there.

    Attributes
    ----------
    called : how often each function was called. cycles : of each sleep.
    device_us : what each run between two events takes. pair_us : what two events take of that.
    stream : of its random generator.
    segments : of the allocator, as a snapshot has them.
    rounding : bytes that are given out for each that is asked for.
    """

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()
        self.cycles: list[int] = []
        self.device_us, self.pair_us = 100.0, 0.0
        self.rounding = 1.0
        self.allocated_bytes = self.peak_bytes = self.reserved_bytes = 0
        self.segments: list[dict[str, Any]] = []
        self.stream = torch.zeros(16, dtype=torch.uint8)

    def allocate(self, size_bytes: int) -> None:
        """Take so many bytes; negative ones give back."""
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, self.peak_bytes)

    def reset_peak(self, *_: Any) -> None:
        self.peak_bytes = self.allocated_bytes

    def memory_stats(self, *_: Any) -> dict[str, int]:
        given = {"current": self.allocated_bytes, "peak": self.peak_bytes}
        return {f"requested_bytes.all.{k}": int(n / self.rounding) for k, n in given.items()}

    def empty_cache(self) -> None:
        self.reserved_bytes = self.allocated_bytes

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        self.stream = state.clone()

    def counting(self, name: str, answer: Any = None) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            self.called[name] += 1
            return answer

        return call

    def event(self, **_: Any) -> Any:
        one = SimpleNamespace(
            record=self.counting("record"), synchronize=self.counting("wait"), is_end=False
        )

        def elapsed_time(other: Any) -> float:
            other.is_end = True  # what begins where a run has ended is a pair without one
            return (self.pair_us if one.is_end else self.device_us + self.pair_us) / 1e3

        one.elapsed_time = elapsed_time
        return one


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A `torch.cuda` with one device that counts and computes nothing."""
    fake = FakeCuda()
    install(fake, monkeypatch)
    return fake


def install(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it in the place of `torch.cuda`."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda *_: contextlib.nullcontext(),
        "synchronize": fake.counting("synchronize"),
        "get_allocator_backend": lambda: "native",
        "get_device_name": lambda *_: TITLE,
        "get_device_properties": lambda *_: PROPERTIES,
        "_sleep": fake.cycles.append,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=fake.counting("pin", 0), cudaHostUnregister=fake.counting("unpin")
        ),
        "Event": fake.event,
        "Stream": lambda: SimpleNamespace(),
        "stream": lambda *_: contextlib.nullcontext(),
        "memory_snapshot": lambda: fake.segments,
        "memory_stats": fake.memory_stats,
        "memory_allocated": lambda *_: fake.allocated_bytes,
        "max_memory_allocated": lambda *_: fake.peak_bytes,
        "memory_reserved": lambda *_: fake.reserved_bytes,
        "max_memory_reserved": lambda *_: fake.reserved_bytes,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "mem_get_info": lambda *_: (10_000, 80_000),
        "reset_peak_memory_stats": fake.reset_peak,
        "empty_cache": fake.empty_cache,
        "get_rng_state": lambda *_: fake.stream.clone(),
        "set_rng_state": fake.set_rng_state,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


@pytest.fixture
def as_if_on_cuda(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    """Lets a step whose tensors are on the CPU pass for one on ``cuda:0``."""
    for module in (refusals, signature):
        monkeypatch.setattr(module, "check_placement", lambda *_: None)
    monkeypatch.setattr(op_costs, "_on_the_host", lambda _: frozenset())
    monkeypatch.setattr(CudaMeter, "settle", lambda _: None)
    monkeypatch.setattr(CudaMeter, "_others", torch.zeros(1))
    monkeypatch.setattr(CudaMeter, "library_bytes", lambda _: LIBRARY_BYTES)
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return cuda
