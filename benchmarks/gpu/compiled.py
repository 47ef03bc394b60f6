"""`torch.compile(backend="remat")` on a device: `python -m benchmarks.gpu.compiled --out FILE`.

Each model is trained under bfloat16 autocast without dropout, whose draws eager and Inductor make
otherwise: by torch's own compiler, and by plans under `--budgets` of the peak that it has there.
The peaks that plans are judged by stand beside the measured ones.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch

from benchmarks.comparison import methods
from benchmarks.comparison.methods import Variant
from benchmarks.comparison.row import SMALL, error
from benchmarks.gpu.device import Bench, asked_of, facts, keep
from remat.compile.graph_context import compiled_plans

MODELS = ("gpt2-small", "resnet-50")
BUDGETS = ("100%", "60%", "40%")


def row(suite: str, name: str, device: str, budget: str) -> dict[str, Any]:
    """One compiled step; torch's own where there is no budget."""
    torch._dynamo.reset()
    bench = Bench(suite, name, device, draws=False)
    model, eager = bench.trainee.model, methods.eager(bench.trainee)
    options = {"budget": budget, "warm": False}
    step = Variant(
        torch.compile(model, backend="remat", options=options) if budget else torch.compile(model)
    )
    expected = bench.gradients(eager)
    began = time.perf_counter()
    found: dict[str, Any] = {"gradients_off_by": error(bench.gradients(step), expected, SMALL)}
    found["first_step_s"] = time.perf_counter() - began
    found |= bench.memory(step)
    times_us = bench.times_us({"eager": eager, "step": step})
    found |= {f"{name}_us": us for name, us in times_us.items()}
    if budget:
        plan = compiled_plans()[-1]
        found |= {
            "budget_bytes": plan.budget_bytes, "predicted_peak_bytes": plan.peak_bytes,
            "stock_peak_bytes": plan.baseline_peak_bytes, "planned_overhead": plan.overhead,
        }  # fmt: skip
    return found


def main() -> int:
    """Measure, print a line a row, and keep the figures."""
    asked = asked_of("compiled", __doc__, MODELS, BUDGETS)
    warnings.simplefilter("ignore")
    kept: dict[str, Any] = {**facts(asked.device), "models": {}}
    for name in asked.models:
        rows = kept["models"][name] = {}
        for budget in ("", *asked.budgets):
            title = budget or "torch.compile"
            try:
                found = row(asked.suite, name, asked.device, budget)
            except Exception as failed:  # noqa: BLE001 - the rest is measured, and it is told
                found = {"error": f"{type(failed).__name__}: {failed}"[:2000]}
            rows[title] = found
            keep(asked.out, kept)
            print(name, title, found, flush=True)
    return int(any("error" in found for rows in kept["models"].values() for found in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
