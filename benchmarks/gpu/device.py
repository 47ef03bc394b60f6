"""A CUDA device, how steps are measured on it, and how figures are kept."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.cells.cell import commit_here
from benchmarks.comparison import bench
from benchmarks.comparison.methods import Variant
from benchmarks.comparison.models import SUITES
from remat.compile.specialize import libraries_bytes
from remat.graph_capture.devices.placement import meter_of

ROUNDS, WARM_UPS = 10, 3


def facts(device: str) -> dict[str, Any]:
    """The device, its versions, the date and the commit."""
    meter = meter_of(device)
    return {
        "device": meter.title, "settings": meter.settings, "commit": commit_here(),
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


class Bench(bench.Bench):
    """A model of a suite on a device, trained under bfloat16 autocast on a GPU.

    Parameters
    ----------
    suite, name : of `benchmarks.comparison.models`. draws : whether dropout is left on.
    """

    def __init__(self, suite: str, name: str, device: str, *, draws: bool = True) -> None:
        gc.collect()  # what is left of an earlier model would be counted beside this one
        super().__init__(SUITES[suite][name].make(), device)
        if not draws:
            for module in self.trainee.model.modules():
                _draw_nothing(module)

    def memory(self, variant: Variant) -> dict[str, int]:
        """Peak and reserved bytes of a step, what libraries keep included."""
        for _ in range(WARM_UPS):
            self.step(variant)
        found = {"reserved_bytes": 0, **self.peaks(variant)}
        return found | {"peak_bytes": found["peak_bytes"] + libraries_bytes(self.device)}

    def times_us(self, variants: Mapping[str, Variant]) -> dict[str, float]:
        """Median time of a step of each; they run in turn, so that the clocks are those of all."""
        measure = self.rounds(*variants.values())
        times_s = zip(*(measure() for _ in range(ROUNDS)), strict=True)
        return {
            name: 1e6 * statistics.median(each)
            for name, each in zip(variants, times_s, strict=True)
        }


def _draw_nothing(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    if isinstance(getattr(module, "dropout", None), float):
        module.dropout = 0.0  # pyright: ignore
