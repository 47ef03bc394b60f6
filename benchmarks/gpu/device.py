"""A CUDA device, how steps are measured on it, and how figures are kept."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparison.models import SUITES, Trainee
from remat.graph_capture.devices.here import meter_of

ROOT = Path(__file__).parents[2]
ROUNDS, WARM_UPS = 10, 3


def facts(device: str) -> dict[str, Any]:
    """The device, its versions, the date and the commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    ).stdout.strip()  # fmt: skip
    meter = meter_of(device)
    return {
        "device": meter.title, "settings": meter.settings, "commit": commit,
        "versions": {"torch": str(torch.__version__), **meter.versions},
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def asked_of(
    name: str, text: str | None, models: Sequence[str], budgets: Sequence[str]
) -> argparse.Namespace:
    """What the command line asks for: models, their suite, the device, budgets, a file."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.gpu.{name}", description=text)
    parser.add_argument("models", nargs="*", default=list(models))
    parser.add_argument("--suite", default="gpu", choices=list(SUITES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budgets", nargs="*", default=list(budgets))
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    return parser.parse_args()


def keep(path: Path | None, found: dict[str, Any]) -> None:
    """Write figures, if they are to be kept; after each row, so that none is lost."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


class Bench:
    """A model of a suite on a device, trained under bfloat16 autocast on a GPU.

    Parameters
    ----------
    suite, name : of `benchmarks.comparison.models`. draws : whether dropout is left on.
    """

    def __init__(self, suite: str, name: str, device: str, *, draws: bool = True) -> None:
        gc.collect()  # what is left of an earlier model would be counted beside this one
        made: Trainee = SUITES[suite][name].make()
        self.device, self.is_cuda = device, device.startswith("cuda")
        self.model, self.blocks = made.model.to(device), made.blocks
        self.args = tuple(arg.to(device) for arg in made.args)
        if not draws:
            for module in self.model.modules():
                _draw_nothing(module)

    def autocast(self) -> AbstractContextManager[Any]:
        """Of the forward of a step."""
        return torch.autocast("cuda", torch.bfloat16) if self.is_cuda else nullcontext()

    def step(self, module: Callable[..., Tensor]) -> None:
        """One forward and backward; gradients of an earlier one are dropped."""
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            loss = module(*self.args)
        loss.backward()

    def gradients(self, module: Callable[..., Tensor]) -> list[Tensor]:
        """Of one step, on the CPU."""
        self.step(module)
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]

    def memory(self, module: Callable[..., Tensor], beside_bytes: int) -> dict[str, int]:
        """Peak and reserved bytes of a step, what libraries keep included.

        Parameters
        ----------
        beside_bytes : what is allocated that is no part of the step.
        """
        for _ in range(WARM_UPS):
            self.step(module)
        if not self.is_cuda:
            return {"peak_bytes": 0, "reserved_bytes": 0}
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step(module)
        torch.cuda.synchronize()
        return {
            "peak_bytes": torch.cuda.max_memory_allocated() - beside_bytes,
            "reserved_bytes": torch.cuda.max_memory_reserved() - beside_bytes,
        }

    def times_us(self, modules: Mapping[str, Callable[..., Tensor]]) -> dict[str, float]:
        """Median time of a step of each; they run in turn, so that the clocks are those of all."""
        times: dict[str, list[float]] = {name: [] for name in modules}
        for number in range(WARM_UPS + ROUNDS):
            for name, module in modules.items():
                taken_us = self._step_us(module)
                if number >= WARM_UPS:
                    times[name].append(taken_us)
        return {name: statistics.median(each) for name, each in times.items()}

    def _step_us(self, module: Callable[..., Tensor]) -> float:
        self._wait()
        began = time.perf_counter()
        self.step(module)
        self._wait()
        return 1e6 * (time.perf_counter() - began)

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def own_bytes(self) -> int:
        """Bytes of parameters, buffers and the batch, each storage once."""
        held = [*self.model.parameters(), *self.model.buffers(), *self.args]
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values()
        )


def _draw_nothing(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    if isinstance(getattr(module, "dropout", None), float):
        module.dropout = 0.0  # pyright: ignore


def off_by(found: Iterable[Tensor], expected: Iterable[Tensor], floor: float = 1e-3) -> float:
    """The largest relative error of gradients; small ones count as `floor` of the largest norm."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    least = floor * max(float(b.norm()) for _, b in pairs)
    return max(float((a - b).norm()) / max(float(b.norm()), least) for a, b in pairs)
