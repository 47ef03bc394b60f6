"""Rewritten modules with Inductor's code: `python -m benchmarks.compiled.rewritten`.

`remat.rematerialize(..., compile=True)` plans the example GPT, without and with dropout, and the
example ResNet, at falling shares of their unmodified peak. Printed are the budget, the peak of the
schedule, the measured peak, the time and the largest error against eager. Ends with status 1 if a
measured peak exceeds its budget, or a step differs from eager by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import remat
from remat.graph_capture.errors import BudgetError
from remat.rewriter.plans.loading import plan_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
ROWS = ("gpt p=0", "gpt p=.1", "resnet")
SIZES = {
    "GPT_WIDTH": "128", "GPT_HEADS": "4", "GPT_SEQ": "128", "GPT_BATCH": "8", "RESNET_BATCH": "32",
}  # fmt: skip
LIMIT_S = 20.0


def built(row: str) -> dict[str, Any]:
    """An example by its row's name."""
    os.environ.update({**SIZES, "GPT_DROPOUT": ".1" if row.endswith(".1") else "0"})
    return importlib.import_module(row.split()[0]).factory()


def line(row: str, percent: int) -> tuple[str, bool]:
    """A line of the table, and whether it is as it should be."""
    made = built(row)
    model, args, batch = made["model"], made["args"], {}
    batch = {name: made.get(name) for name in ("kwargs", "loss_fn", "target")}
    head = f"{row:9}{percent:4} %"
    try:
        module = remat.rematerialize(
            model, args, **batch, budget=f"{percent}%", time_limit_s=LIMIT_S,
            compile=True, check=False,
        )  # fmt: skip
    except BudgetError as error:
        return f"{head}  {str(error)[:100]}", True
    found = remat.check(model, module, args, **batch, steps=9)
    budget_bytes = percent * found.baseline_peak_bytes // 100
    peaks = (budget_bytes, plan_of(module).prediction.peak_bytes, found.plan_peak_bytes)  # pyright: ignore
    shown = "".join(f"{peak / 1e6:10.2f}" for peak in peaks)
    slower = 100 * found.overhead
    text = f"{head}{shown}{slower:9.1f} %{found.largest_error:12.1e}"
    return text, found.equal and found.plan_peak_bytes <= budget_bytes


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.compiled.rewritten", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--percents", nargs="+", type=int, default=[80, 60, 45, 30])
    asked = parser.parse_args()
    print("example        budget  schedule  measured     time       error")
    is_right = True
    for row in asked.rows:
        for percent in asked.percents:
            text, is_good = line(row, percent)
            is_right = is_right and is_good
            print(text, flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
