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

import remat
from benchmarks.gpu.device import Bench, asked_of, facts, keep, off_by
from remat.compile.on_device import libraries_bytes

MODELS = ("gpt2-small", "resnet-50")
BUDGETS = ("100%", "60%", "40%")


def row(suite: str, name: str, device: str, budget: str) -> dict[str, Any]:
    """One compiled step; torch's own where there is no budget."""
    torch._dynamo.reset()
    bench = Bench(suite, name, device, draws=False)
    beside_bytes = 0
    if bench.is_cuda:
        torch.cuda.empty_cache()
        kept_bytes = libraries_bytes(device)
        beside_bytes = torch.cuda.memory_allocated() - bench.own_bytes() - kept_bytes
    options = {"budget": budget, "warm": False}
    step = (
        torch.compile(bench.model, backend="remat", options=options)
        if budget
        else torch.compile(bench.model)
    )
    expected = bench.gradients(bench.model)
    began = time.perf_counter()
    found: dict[str, Any] = {"gradients_off_by": off_by(bench.gradients(step), expected)}
    found["first_step_s"] = time.perf_counter() - began
    found |= bench.memory(step, beside_bytes)
    found |= {
        f"{name}_us": us
        for name, us in bench.times_us({"eager": bench.model, "step": step}).items()
    }
    if budget:
        plan = remat.compiled_plans()[-1]
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
            except Exception as error:  # noqa: BLE001 - the rest is measured, and it is told
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
            rows[title] = found
            keep(asked.out, kept)
            print(name, title, found, flush=True)
    return int(any("error" in found for rows in kept["models"].values() for found in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
