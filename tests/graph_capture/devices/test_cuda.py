"""How a CUDA device is measured, on one that only counts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.graph_capture.costs.cache import CostCache
from remat.graph_capture.devices import cuda as cuda_device
from remat.graph_capture.devices.cuda import CYCLES_PER_US, MOST_SLEEP_US, CudaMeter
from remat.graph_capture.devices.meter import CpuMeter
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.errors import DeviceError
from tests.fake_cuda import L2_BYTES, PROPERTIES, TITLE, FakeCuda, cuda

__all__ = ["cuda"]


class LtOnly(Enum):
    Cublaslt = 1


@pytest.fixture
def meter(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> CudaMeter:
    found = CudaMeter("cuda:0")
    found._others = torch.zeros(1)
    return found


def test_each_device_has_its_meter(cuda: FakeCuda) -> None:
    assert isinstance(meter_of("cpu"), CpuMeter)
    assert (meter_of("cuda:0").device, meter_of("cuda:0").title) == ("cuda:0", TITLE)


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_that_does_not_count_requests_is_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    says = f"^take `backend:` out of PYTORCH_CUDA_ALLOC_CONF.* {allocator} does not count"
    with pytest.raises(DeviceError, match=says):
        meter_of("cuda:0")


def test_the_time_of_an_op_on_the_device_and_on_the_host(cuda: FakeCuda, meter: CudaMeter) -> None:
    cuda.device_us = 5e4
    assert meter.median_us(lambda: time.sleep(2e-3)) == 5e4
    assert 1e3 < meter.queue_us(lambda: time.sleep(2e-3)) < 5e4


def test_the_host_is_ahead_of_the_device_while_it_is_timed(
    cuda: FakeCuda, meter: CudaMeter
) -> None:
    meter.median_us(lambda: time.sleep(1e-3))
    assert min(cuda.cycles) >= 2 * 1000 * CYCLES_PER_US
    meter.median_us(lambda: time.sleep(6e-3))
    assert max(cuda.cycles) == CYCLES_PER_US * MOST_SLEEP_US


@pytest.mark.parametrize("moved_bytes", [0, L2_BYTES, 9 * L2_BYTES])
def test_an_op_finds_the_cache_full_of_others_that_need_not_be_written_back(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, moved_bytes: int
) -> None:
    zeros, others = torch.zeros, list[Reads]()

    def read(size: int, **how: Any) -> Reads:
        others.append(Reads(zeros(size, dtype=how["dtype"])))
        return others[-1]

    monkeypatch.setattr(torch, "zeros", read)
    CudaMeter("cuda:0").median_us(lambda: None, moved_bytes)
    (found,) = others
    assert found.whole.nbytes == 2 * L2_BYTES
    assert found.n_read == len(cuda.cycles) > 0


class Reads:
    """Can only be read."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.n_read = whole, 0

    def sum(self) -> None:
        self.n_read += 1


def test_what_two_events_take_is_no_ops_time(cuda: FakeCuda, meter: CudaMeter) -> None:
    cuda.device_us, cuda.pair_us = 5.0, 3.0
    assert meter.median_us(lambda: None) == pytest.approx(5.0)
    cuda.device_us = -1.0  # noise
    assert meter.median_us(lambda: None) == 0.0


def test_an_op_runs_until_its_time_settles(cuda: FakeCuda, meter: CudaMeter) -> None:
    falling = iter([800.0, 400.0, 200.0, *[100.0] * 1000])
    runs: list[None] = []

    def run() -> None:
        runs.append(None)
        cuda.device_us = next(falling)

    assert meter.median_us(run) == 100.0


ASKED = "clocks.sm,clocks.mem,clocks_throttle_reasons.active,power.draw,temperature.gpu"
SMI = f"""#!/bin/sh
[ "$1 $4" = "--query-gpu={ASKED} GPU-12345" ] || exit 6
echo "1980, 2619, 0x0000000000000004, 612.31, [N/A]"
"""
CLOCKS = {
    "sm_mhz": "1980", "memory_mhz": "2619", "throttled": "0x0000000000000004", "watts": "612.31",
    "degrees": "[N/A]",
}  # fmt: skip


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tool of NVIDIA's that knows the one device of `FakeCuda`."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("smi")
def test_the_clocks_are_given_time_and_read_while_the_device_works(
    cuda: FakeCuda, meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    randn, read, worked = torch.randn, cuda_device.clocks, list[int]()

    def slowly(device: str) -> dict[str, str]:
        before = cuda.called["synchronize"]
        time.sleep(0.2)
        worked.append(cuda.called["synchronize"] - before)
        return read(device)

    monkeypatch.setattr(torch, "randn", lambda *_, dtype, device: randn(4, 4, dtype=dtype))
    monkeypatch.setattr(cuda_device, "clocks", slowly)
    monkeypatch.setattr(cuda_device, "SETTLE_S", 0.05)
    start = time.perf_counter()
    meter.settle()
    assert time.perf_counter() - start > 0.25
    assert worked[0] > 0
    assert meter.clocks == CLOCKS


@pytest.mark.usefixtures("smi")
def test_a_device_that_nobody_knows_has_no_clocks(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cuda_device.clocks("cuda:0") == CLOCKS
    assert cuda_device.clocks("cpu") == {}
    monkeypatch.setattr(PROPERTIES, "uuid", "another")
    assert cuda_device.clocks("cuda:0") == {}
    monkeypatch.setenv("PATH", "")
    assert cuda_device.clocks("cuda:0") == {}
    monkeypatch.setenv("PATH", str(tmp_path / "odd"))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\n")
    (tmp_path / "odd" / "nvidia-smi").chmod(0o755)
    assert cuda_device.clocks("cuda:0") == {}


def test_the_memory_of_ops_is_what_they_ask_for(cuda: FakeCuda, meter: CudaMeter) -> None:
    def run() -> Any:
        cuda.allocate(700)
        cuda.allocate(-300)

    cuda.allocate(5000)
    (first, second) = meter.regions([run, lambda: cuda.allocate(8)])
    assert (first.peak_bytes, first.final_bytes) == (700, 400)
    assert (second.peak_bytes, second.final_bytes) == (8, 8)


def test_the_memory_of_a_step_is_its_peak_and_what_is_reserved_beside_it(
    cuda: FakeCuda, meter: CudaMeter
) -> None:
    def step() -> None:
        cuda.allocate(3000)
        cuda.reserved_bytes += 500
        cuda.allocate(-3000)

    cuda.allocate(1000)
    cuda.reserved_bytes = 9999
    found = meter.step_memory(step)
    assert (found.peak_bytes, found.slack_bytes, found.rounding_bytes) == (3000, 500, 0)


def test_what_the_allocator_gives_beyond_what_is_asked_is_told_apart(
    cuda: FakeCuda, meter: CudaMeter
) -> None:
    cuda.rounding = 1.5
    found = meter.step_memory(lambda: cuda.allocate(3000))
    assert (found.peak_bytes, found.rounding_bytes) == (3000, 1000)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_workspace_that_a_captured_graph_may_hold_is_not_freed(
    cuda: FakeCuda, meter: CudaMeter, monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    taken: dict[Any, int] = {None: 700}  # by stream: of one workspace each
    streams: list[Any] = [None]

    def products(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if streams[-1] not in taken:
            cuda.allocate(taken.setdefault(streams[-1], 700))
        return x * 1

    def clear() -> None:
        for size_bytes in taken.values():
            cuda.allocate(-size_bytes)
        taken.clear()

    @contextmanager
    def stream(one: Any) -> Iterator[None]:
        streams.append(one or streams[-1])
        yield
        streams.pop()

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device, **how: ones(*size, **how))
    monkeypatch.setattr(cuda_device, "_products", products)
    monkeypatch.setattr(cuda_device, "clear_cublas_workspaces", clear)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    cuda.allocate(700)
    cuda.segments = [{"segment_pool_id": pool} for pool in [(0, 0), (0, 1)][: 1 + is_captured]]
    cuda_device._library_bytes.cache_clear()
    try:
        assert [meter.library_bytes(), meter.library_bytes()] == [700, 700]
        assert len(taken) == 1 + is_captured  # what was there is there, or was measured
        clear()
        assert (meter.library_bytes(), list(taken)) == (700, [None])  # as a step finds them
    finally:
        cuda_device._library_bytes.cache_clear()


def test_the_streams_are_kept_while_ops_run(cuda: FakeCuda, meter: CudaMeter) -> None:
    before = torch.get_rng_state()
    with meter.quiet():
        cuda.set_rng_state(torch.ones(16, dtype=torch.uint8))
        torch.rand(3)
        assert not torch.is_grad_enabled()
    assert cuda.stream.sum() == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_what_changes_kernels_changes_the_file_of_costs(
    cuda: FakeCuda, meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: Any = torch.backends.cuda.matmul
    names = [CostCache.of(meter).path.name]

    def another() -> bool:
        names.append(CostCache.of(meter).path.name)
        return names.count(names[-1]) == 1

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert another()
    try:
        for name, value in (
            ("bf16_reduced_precision_reduction", False),
            ("bf16_reduced_precision_reduction", (False, False)),
            ("fp16_reduced_precision_reduction", False),
            ("fp16_accumulation", True),
        ):
            setattr(products, f"allow_{name}", value)
            assert another(), name
    finally:
        products.allow_bf16_reduced_precision_reduction = True
        products.allow_fp16_reduced_precision_reduction = True
        products.allow_fp16_accumulation = False
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: LtOnly.Cublaslt)
    assert another()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert another()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)
    assert another()
    monkeypatch.setattr(cuda_device, "_driver_version", lambda: "999.99.99")
    assert another()
    assert not another()  # but what is the same goes into the same file
    assert max(map(len, names)) < 250


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35  Rel", "560.35"),
        ("nothing of the kind", "unknown"),
    ],
)
def test_the_version_of_the_driver(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, text: str, version: str
) -> None:
    monkeypatch.setattr(cuda_device, "DRIVER", tmp_path / "version")
    assert cuda_device._driver_version() == "unknown"
    (tmp_path / "version").write_text(text)
    assert cuda_device._driver_version() == version
