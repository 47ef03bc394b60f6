"""Plans that copy values to the host, on a device: `python -m benchmarks.gpu.copies --out FILE`.

Each model is trained under bfloat16 autocast within a share of its peak: by recomputation alone, by
copies alone, and by both. All of it runs with kernels that repeat their bits, so that gradients can
be held against eager's to the last bit. Peaks, and what is copied, stand beside what was judged.
Ends with status 1 if a gradient differs, a peak is off by more than 2 %, or no plan copies.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.comparison import methods
from benchmarks.comparison.methods import Variant
from benchmarks.gpu.device import Bench, asked_of, facts, keep
from benchmarks.gpu.steps import text_of
from remat.graph_capture.graph import TrainingGraph
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate

MODELS, BUDGETS = ("gpt2-small",), ("60%",)
HOST, HOST_OF_CPU = "16GiB", "1GiB"
"""What a CPU calls its host is files, which need not have much room."""
LIMIT_S = 5.0
PEAK_ERROR = 0.02
WAYS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "recomputing": (False, ()),
    "copying": (True, ("*",)),
    "both": (True, ()),
}
"""Whether there is a host, and modules in which nothing is computed again."""


def rows_of(bench: Bench, budget: str) -> dict[str, Any]:
    """The unmodified step, and a row for each way to make it fit."""
    eager = methods.eager(bench.trainee)
    variants = {"unmodified": eager}
    rows: dict[str, Any] = {"unmodified": bench.memory(eager)}
    host = HOST if bench.is_cuda else HOST_OF_CPU
    graphs = {has_host: captured(bench, host if has_host else None) for has_host in (False, True)}
    for name, (has_host, kept) in WAYS.items():
        graph = graphs[has_host]
        result = remat.solve(graph, budget, time_limit_s=LIMIT_S, gap=GAP_OF_FIGURES, keep=kept)
        if result.schedule is None:
            rows[name] = {"status": result.status, "message": result.message}
            continue
        variant = variants[name] = planned(bench, graph, result.schedule)
        rows[name] = {"status": result.status, "gap": result.gap}
        rows[name] |= judged(graph, result.schedule) | compared(bench, eager, variant)
        rows[name] |= bench.memory(variant)
    for name, step_us in bench.times_us(variants).items():
        rows[name]["step_us"] = step_us
    return rows


def captured(bench: Bench, host: str | None) -> TrainingGraph:
    """The step, with the links to so much of the host."""
    with bench.autocast():
        trainee = bench.trainee
        return remat.capture(
            trainee.model, trainee.args, device=bench.device, host=host, split="none"
        )


def planned(bench: Bench, graph: TrainingGraph, schedule: Schedule) -> Variant:
    """The module that follows the schedule."""
    with bench.autocast():
        return Variant(agreed_rewrite(bench.trainee.model, schedule, costed=graph))


def judged(graph: TrainingGraph, schedule: Schedule) -> dict[str, Any]:
    """What `simulate` says."""
    found = simulate(graph, schedule)
    return {
        "predicted_peak_bytes": found.peak_bytes, "predicted_step_us": found.time_us,
        "copied_bytes": found.moved_bytes.get("d2h", 0), "stall_us": found.stall_us,
        "host_peak_bytes": found.host_peak_bytes,
    }  # fmt: skip


def compared(bench: Bench, eager: Variant, variant: Variant) -> dict[str, int]:
    """How many gradients have eager's bits."""
    expected, found = bench.gradients(eager), bench.gradients(variant)
    equal = sum(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return {"gradients_equal": equal, "gradients": len(expected)}


def complaints(rows: dict[str, Any]) -> list[str]:
    """The faults of a model's rows."""
    found: list[str] = []
    ran = {name: row for name, row in rows.items() if "copied_bytes" in row}
    for name, row in ran.items():
        if row["gradients_equal"] < row["gradients"]:
            found.append(f"{name}: {row['gradients_equal']} of {row['gradients']} gradients equal")
        off = row["predicted_peak_bytes"] / row["peak_bytes"] - 1
        if abs(off) > PEAK_ERROR:
            found.append(f"{name}: the peak is off by {100 * off:.1f} %")
    if not any(row["copied_bytes"] for row in ran.values()):
        found.append("no plan copies anything")
    return found


def main() -> int:
    """Measure, print a line a row, and keep the figures."""
    asked = asked_of("copies", __doc__, MODELS, BUDGETS)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    kept: dict[str, Any] = {**facts(asked.device), "models": {}}
    failed = False
    for name in asked.models:
        kept["models"][name] = {}
        for budget in asked.budgets:
            rows = rows_of(Bench(asked.suite, name, asked.device), budget)
            kept["models"][name][budget] = rows
            keep(asked.out, kept)
            print(f"{name}, {budget}", *complaints(rows), flush=True)
            failed |= bool(complaints(rows))
            for row_name, row in rows.items():
                said = {k: row[k] for k in ("gradients_equal", "copied_bytes") if k in row}
                print(text_of(row_name, row, rows["unmodified"]), said or "", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
