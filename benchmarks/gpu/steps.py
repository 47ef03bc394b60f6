"""Plans of models of published sizes on a GPU: `python -m benchmarks.gpu.steps --out FILE`.

Each model is trained under bfloat16 autocast: as it is, with each of its blocks checkpointed, and
by plans under `--budgets`. Peaks, reserved bytes and times stand beside what was predicted of them.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.comparison import methods
from benchmarks.comparison.methods import Variant
from benchmarks.gpu.device import Bench, asked_of, facts, keep
from remat.analysis.plan_figures import predict_reserved
from remat.budgets import unmodified_step
from remat.graph_capture.graph import TrainingGraph
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.outcome import Result

MODELS = ("gpt2-small", "vit-b", "resnet-50", "unet", "llama-1b", "gpt2-medium")
BUDGETS = ("80%", "60%", "40%", "min")
LIMIT_S = 5.0
CHECKPOINTED = "every block checkpointed"


def rows_of(bench: Bench, budgets: list[str]) -> dict[str, Any]:
    """All rows of a model."""
    trainee = bench.trainee
    with bench.autocast():
        graph = remat.capture(trainee.model, trainee.args, device=bench.device)
    eager = unmodified_step(graph)
    rows = {"unmodified": _predicted(eager.graph, eager.result), CHECKPOINTED: {}}
    variants = {"unmodified": methods.eager(trainee)}
    variants[CHECKPOINTED] = methods.checkpointed(trainee, 1)
    for budget in budgets:
        result = remat.solve(graph, budget, time_limit_s=LIMIT_S, gap=GAP_OF_FIGURES)
        if result.schedule is None:
            rows[budget] = {"status": result.status, "message": result.message}
            continue
        with bench.autocast():
            variants[budget] = Variant(agreed_rewrite(trainee.model, result.schedule))
        rows[budget] = {"status": result.status, "gap": result.gap, **_predicted(graph, result)}
    for name, variant in variants.items():
        rows[name] |= bench.memory(variant)
    for name, step_us in bench.times_us(variants).items():
        rows[name]["step_us"] = step_us
    return {"ops": len(graph.ops), "rows": rows}


def _predicted(graph: TrainingGraph, result: Result) -> dict[str, Any]:
    assert result.schedule is not None
    found = {"predicted_peak_bytes": result.peak_bytes, "predicted_step_us": result.time_us}
    if graph.device.startswith("cuda"):
        reserved = predict_reserved(graph, result)
        found["predicted_reserved_bytes"] = reserved.default.reserved_bytes
    return found


def text_of(name: str, row: dict[str, Any], base: dict[str, Any]) -> str:
    """A row in one line: measured, and predicted over measured."""
    if "peak_bytes" not in row:
        return f"  {name:26}{row['status']}: {row['message'][:70]}"
    said = f"  {name:26}{row['peak_bytes'] / 2**20:9.1f} MiB {row['step_us'] / 1e3:8.2f} ms"
    said += f" {100 * (row['step_us'] / base['step_us'] - 1):+6.1f} %"
    for what in ("peak_bytes", "step_us", "reserved_bytes"):
        if f"predicted_{what}" in row and row[what]:
            off = row[f"predicted_{what}"] / row[what] - 1
            said += f"   {what.split('_')[0]} {100 * off:+.2f} %"
    return said


def main() -> int:
    """Measure, print a line a row, and keep the figures."""
    asked = asked_of("steps", __doc__, MODELS, BUDGETS)
    warnings.simplefilter("ignore")
    kept: dict[str, Any] = {**facts(asked.device), "models": {}}
    for name in asked.models:
        kept["models"][name] = found = rows_of(
            Bench(asked.suite, name, asked.device), asked.budgets
        )
        keep(asked.out, kept)
        print(f"{name}, {found['ops']} ops", flush=True)
        for row_name, row in found["rows"].items():
            print(text_of(row_name, row, found["rows"]["unmodified"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
