"""A model on a device, and what a row says of a step of it."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

from benchmarks.cells.cell import commit_here
from benchmarks.comparison import bench, methods
from benchmarks.comparison.methods import Variant
from benchmarks.comparison.models import Entry
from benchmarks.comparison.row import SMALL, error
from benchmarks.gpu.rows import Row
from remat.compile.specialize import libraries_bytes
from remat.graph_capture.devices.cuda import clocks
from remat.graph_capture.devices.placement import meter_of

WARM_UPS = 2
PACKAGES = ("ortools", "pulp", "msgspec", "protobuf", "numpy", "triton", "filelock")


def facts(device: str) -> Row:
    """The device, its clocks, versions, the date and the commit."""
    meter = meter_of(device)
    return {
        "device": meter.title, "settings": meter.settings, "commit": _tried(commit_here),
        "versions": {"torch": str(torch.__version__), **meter.versions},
        "packages": {name: _tried(importlib.metadata.version, name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
        "cores": os.cpu_count(), "clocks": clocks(device),
    }  # fmt: skip


def _tried(read: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or the text of its error: one fact that is missing loses no other."""
    try:
        return read(*args)
    except Exception as failed:  # noqa: BLE001
        return f"{type(failed).__name__}: {failed}"


def settled() -> None:
    """Let go of what no name holds, so that the next step finds the memory that it should."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def generate_no_kernels() -> None:
    """Let Inductor call torch's kernels, for a rehearsal: C++ takes a minute to compile."""
    inductor_config.fallback_by_default = True


class Bench(bench.Bench):
    """A model on a device, trained under autocast to `dtype`.

    Parameters
    ----------
    draws : whether dropout is left on. rounds : of steps that are timed in turn.
    """

    def __init__(
        self, entry: Entry, device: str, *, draws: bool = True, rounds: int = 8,
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:  # fmt: skip
        settled()
        self.n_rounds, self.dtype = rounds, dtype
        with torch.device(device):  # a processor would take long to draw a billion weights
            trainee = entry.make()
        super().__init__(trainee, device)
        if not draws:
            for module in trainee.model.modules():
                _draw_nothing(module)

    def autocast(self) -> AbstractContextManager[Any]:
        """As the model is trained, on a CPU too."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, self.dtype)

    def memory(self, variant: Variant) -> Row:
        """Peak and reserved bytes of a step, what libraries keep included."""
        for _ in range(WARM_UPS):
            self.step(variant)
        found = {"reserved_bytes": 0, **self.peaks(variant)}
        return found | {"peak_bytes": found["peak_bytes"] + libraries_bytes(self.device)}

    def times_us(self, variants: Mapping[str, Variant]) -> Row:
        """Median time of a step of each; they run in turn, so that the clocks are those of all."""
        measure = self.rounds(*variants.values())
        times_s = zip(*(measure() for _ in range(self.n_rounds)), strict=True)
        return {
            f"{name}_us": 1e6 * statistics.median(each)
            for name, each in zip(variants, times_s, strict=True)
        }

    def gradients(self, variant: Variant) -> list[Tensor]:
        """In the host's memory, where they take nothing from the step."""
        torch.manual_seed(bench.SEED)
        self.step(variant)
        return [p.grad.cpu() for p in self.parameters if p.grad is not None]


def equal_to(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Row:
    """How many gradients have the same bits, and how far the others are off."""
    equal = sum(map(torch.equal, found, expected))
    off = 0.0 if equal == len(expected) else error(list(found), list(expected), SMALL)
    return {"gradients": len(expected), "gradients_equal": equal, "gradients_off_by": off}


def beside_eager(bench: Bench, variant: Variant) -> Row:
    """Gradients of a variant and of eager again beside eager's; peak and reserved bytes."""
    eager = methods.eager(bench.trainee)
    expected = bench.gradients(eager)
    row = equal_to(expected, bench.gradients(variant))
    again = equal_to(expected, bench.gradients(eager))
    return row | {"eager_equal": again["gradients_equal"], **bench.memory(variant)}


def _draw_nothing(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    if isinstance(getattr(module, "dropout", None), float):
        module.dropout = 0.0  # pyright: ignore
