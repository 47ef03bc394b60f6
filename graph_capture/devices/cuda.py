"""How a CUDA device is measured: by events of its stream, and by the counters of its allocator.

An op has two times: the device's, between events that are queued while it sleeps, so that no gap of
the host counts; and the host's, to queue it. A step is timed until the device has run all of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from remat.graph_capture.devices.known_devices import CPU, CUDA, is_cuda, title_with_memory
from remat.graph_capture.devices.memory_events import Moment, RegionMemory, without_garbage
from remat.graph_capture.devices.meter import Run, StepMemory, median_of
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.torch_private.core import (
    clear_cublas_workspaces,
    cuda_sleep,
    precision_settings,
)

SETTLE_S = 2.0  # products run so long before the first op is timed: clocks rise, then sink by heat
_HEATING = 4096  # rows and columns of these
_SETTLED, _MOST_WARM_UPS = 0.05, 10  # an op is warm once two runs differ by less, or after so many
CYCLES_PER_US, MOST_SLEEP_US = 2_000, 10_000  # the first is beyond today's clocks
PROBE = 64  # rows and columns of the product that makes cuBLAS allocate what it keeps
_SUMS = (  # of products, that may be less exact than their terms
    "fp16_accumulation", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction",
    "fp16_reduced_precision_reduction_split_k", "bf16_reduced_precision_reduction_split_k",
)  # fmt: skip
_TF32 = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS and cuDNN
_SMI_S = 30.0  # seconds after which it is not waited for
DRIVER = Path("/proc/driver/nvidia/version")


class CudaMeter:
    def __init__(self, device: str) -> None:
        if (allocator := torch.cuda.get_allocator_backend()) != "native":
            raise DeviceError(
                "take `backend:` out of PYTORCH_CUDA_ALLOC_CONF, or set no allocator of your own: "
                f"the allocator {allocator} does not count what ops ask of it, so no workspace and "
                "no peak could be measured"
            )
        self.device = device
        found = torch.cuda.get_device_properties(device)
        self.title = title_with_memory(torch.cuda.get_device_name(device), found.total_memory)
        self.passes, self.cache_bytes = 1, int(found.L2_cache_size)
        self.clocks = dict[str, str]()

    @functools.cached_property
    def _others(self) -> Tensor:
        # Twice as large as the cache, which need not drop first what was read longest ago.
        return torch.zeros(2 * self.cache_bytes, dtype=torch.uint8, device=self.device)

    @property
    def settings(self) -> str:
        """What changes the kernels that run, or how fast they are."""
        cudnn, backends = torch.backends.cudnn, torch.backends.cuda
        sums = "".join(f"{getattr(backends.matmul, f'allow_{name}'):d}" for name in _SUMS)
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{versions} float32 {' '.join(precision_settings()[:3])} sums {sums} "
            f"{backends.preferred_blas_library().name} {os.environ.get(_TF32, '')} "
            f"cudnn {cudnn.enabled:d}{cudnn.benchmark:d}{cudnn.deterministic:d} "
            f"exact {torch.are_deterministic_algorithms_enabled():d}"
        )

    @property
    def versions(self) -> dict[str, str]:
        return {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": _driver_version(),
        }

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        index = torch.device(self.device).index
        with (
            torch.no_grad(),
            torch.autocast(CPU, enabled=False),
            torch.autocast(CUDA, enabled=False),
            torch.random.fork_rng([index]),
        ):
            try:
                yield
            finally:  # made data leaves segments of sizes that no step asks for
                torch.cuda.empty_cache()

    def is_quiet(self) -> bool:
        """False: how busy it was is not known of its times, so none are in doubt."""
        return False

    def settle(self) -> None:
        """Let the clocks come to what they are in a step, and note them while the device works."""
        x = torch.randn(_HEATING, _HEATING, dtype=torch.float16, device=self.device)

        def heat(until: Callable[[], bool]) -> None:
            while not until():
                torch.mm(x, x)
                torch.cuda.synchronize(self.device)

        end = time.perf_counter() + SETTLE_S
        heat(lambda: time.perf_counter() >= end)
        with ThreadPoolExecutor(1) as aside:
            reading = aside.submit(clocks, self.device)
            heat(reading.done)
        self.clocks = reading.result()

    def median_us(self, run: Run, moved_bytes: int = 0) -> float:
        """The median of what the device takes. Its L2 cache is full of other data, all of it clean:
        what a run writes back is its own."""
        del moved_bytes
        with torch.cuda.device(self.device):
            host_us = self.queue_us(run)
            self._warm_up(run, host_us)
            return median_of(lambda: self._device_us(run, host_us))

    def queue_us(self, run: Run) -> float:
        with torch.cuda.device(self.device):
            return median_of(lambda: self._host_us(run))

    def often_us(self, *runs: Run) -> list[float]:
        return [self.median_us(run) for run in runs]

    def regions(self, regions: Iterable[Run]) -> list[RegionMemory]:
        """By the bytes asked of the allocator. The callables must have run before."""
        # Blocks given depend on what was freed before. What cuBLAS and cuDNN keep is no op's.
        found: list[RegionMemory] = []
        with without_garbage():
            for region in regions:
                torch.cuda.reset_peak_memory_stats(self.device)
                before_bytes = self._requested_bytes("current")
                kept = region()
                after_bytes = [self._requested_bytes(which) for which in ("peak", "current")]
                found.append(RegionMemory(*(size - before_bytes for size in after_bytes)))
                del kept, region
        return found

    def moments(self, run: Callable[[Callable[[str], None]], Any]) -> list[Moment]:
        found: list[Moment] = []
        before_bytes = self._requested_bytes("current")

        def name(moment: str) -> None:
            sizes = [self._requested_bytes(which) - before_bytes for which in ("current", "peak")]
            found.append(Moment(moment, *sizes))
            torch.cuda.reset_peak_memory_stats(self.device)

        torch.cuda.reset_peak_memory_stats(self.device)
        with without_garbage():
            result = run(name)
        name("end")
        del result
        return found

    def step_us(self, run: Run) -> float:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            return self._between_events_us(run)

    def of_rounds(self, times: Sequence[float]) -> float:
        """The median of the later half: by then clocks have sunk to what the power allows."""
        return statistics.median(times[len(times) // 2 :])

    def step_memory(self, run: Run) -> StepMemory:
        """By ``max_memory_allocated``, from an allocator that holds nothing in reserve."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before_bytes = torch.cuda.memory_allocated(self.device)
        before_asked_bytes = self._requested_bytes("current")
        with without_garbage():
            result = run()
        del result
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - before_bytes
        asked_bytes = self._requested_bytes("peak") - before_asked_bytes
        slack_bytes = torch.cuda.max_memory_reserved(self.device) - before_bytes - peak_bytes
        # Blocks may be larger than what was asked for.
        return StepMemory(peak_bytes, max(0, peak_bytes - asked_bytes), max(0, slack_bytes))

    def library_bytes(self) -> int:
        """What cuBLAS and cuBLASLt keep: for the thread of forward, and for that of backward."""
        with torch.cuda.device(self.device), torch.enable_grad():
            kept_bytes = _library_bytes(self.device)
            _run_products(self.device)  # others may have cleared what a step would take anew
        return kept_bytes

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def _requested_bytes(self, which: str) -> int:
        return int(torch.cuda.memory_stats(self.device)[f"requested_bytes.all.{which}"])

    def _host_us(self, run: Run) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = run()
        taken_us = 1e6 * (time.perf_counter() - start)
        del result
        return taken_us

    def _warm_up(self, run: Run, host_us: float) -> None:
        last_us = float("inf")
        for _ in range(_MOST_WARM_UPS):
            now_us = self._device_us(run, host_us)
            if abs(now_us - last_us) <= _SETTLED * last_us < float("inf"):
                return
            last_us = now_us

    def _device_us(self, run: Run, host_us: float) -> float:
        self._others.sum()
        # The device sleeps until all is queued, so that no gap of the host counts.
        cuda_sleep(int(CYCLES_PER_US * min(2 * host_us, MOST_SLEEP_US)))
        start, end, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        result: Any = run()
        end.record()
        after.record()
        after.synchronize()
        del result
        # Without the time from one event to the next, which is as much as a small kernel takes.
        return max(0.0, 1e3 * (start.elapsed_time(end) - end.elapsed_time(after)))

    def _between_events_us(self, run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result: Any = run()
        end.record()
        end.synchronize()
        del result
        return 1e3 * start.elapsed_time(end)


@functools.cache  # as what another stream takes stays with it
def _library_bytes(device: str) -> int:
    # A captured CUDA graph, which has a pool of its own, may write to a workspace when replayed. So
    # beside one none is freed, and a stream without any takes as much.
    is_captured = any(any(one["segment_pool_id"]) for one in torch.cuda.memory_snapshot())
    torch.cuda.synchronize()
    if not is_captured:
        clear_cublas_workspaces()
    with torch.cuda.stream(torch.cuda.Stream() if is_captured else None):
        before_bytes = torch.cuda.memory_allocated()
        _run_products(device)
        return torch.cuda.memory_allocated() - before_bytes


def _run_products(device: str) -> None:
    probe = torch.ones(PROBE, PROBE, device=device, requires_grad=True)
    bias = torch.ones(PROBE, device=device)  # products with a bias are cuBLASLt's
    # Recomputation, in backward's thread, runs the first product and stops before the last.
    checkpoint(_products, probe, bias, use_reentrant=False).sum().backward()


def _products(x: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(functional.linear(x, x, bias), x, bias)


def _driver_version() -> str:
    """``unknown`` where the driver has no file here."""
    if not DRIVER.exists():
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER.read_text(encoding="utf-8"))
    return found.group() if found else "unknown"


_OF_SMI = {  # what a row calls it, and `nvidia-smi`
    "sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem",
    "throttled": "clocks_throttle_reasons.active", "watts": "power.draw",
    "degrees": "temperature.gpu",
}  # fmt: skip


def clocks(device: str) -> dict[str, str]:
    """MHz, reasons of throttling, watts and degrees now; empty where `nvidia-smi` does not say."""
    if not is_cuda(device):
        return {}
    # By its name: numbers are those of all devices, and torch may see a few.
    which = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    asked = [f"--query-gpu={','.join(_OF_SMI.values())}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):  # or it says else
        told = subprocess.run(
            ["nvidia-smi", *asked, "-i", which],
            capture_output=True, text=True, check=True, timeout=_SMI_S,
        )  # fmt: skip
        return dict(zip(_OF_SMI, told.stdout.strip().split(", "), strict=True))
    return {}
