"""What the docs say of a GPU is what the kept files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import gpu_page

FACTS: dict[str, Any] = {
    "device": "A card", "versions": {"torch": "2.13.0"}, "date": "2026-11-26",
}  # fmt: skip


def test_the_page_is_that_of_the_files() -> None:
    text = gpu_page.PAGE.read_text()
    assert gpu_page.written_into(text) == text


def test_every_file_that_a_visit_leaves_has_its_part() -> None:
    script = (gpu_page.ROOT / "benchmarks" / "gpu_run.sh").read_text()
    left = {name for name in gpu_page.PARTS if f"/{name}.json" in script}
    assert left == {"steps", "compiled", "links", "copies"}
    assert {path.stem for path in gpu_page.RESULTS.glob("*.json")} <= set(gpu_page.PARTS)


def test_plans_with_copies_are_shown_with_what_they_copy(tmp_path: Path) -> None:
    ran = {
        "predicted_peak_bytes": 3 << 20, "peak_bytes": 3 << 20, "reserved_bytes": 4 << 20,
        "predicted_step_us": 1500.0, "step_us": 2000.0, "copied_bytes": 5 << 20,
        "gradients_equal": 7, "gradients": 7,
    }  # fmt: skip
    rows = {
        "unmodified": {"peak_bytes": 6 << 20, "reserved_bytes": 8 << 20, "step_us": 1000.0},
        "recomputing": {"status": "infeasible", "message": "no schedule fits"}, "both": ran,
    }  # fmt: skip
    kept = {**FACTS, "models": {"gpt": {"60%": rows}}}
    (tmp_path / "copies.json").write_text(json.dumps(kept))
    assert gpu_page.lines_of(tmp_path) == [
        "A card, torch 2.13.0; 2026-11-26. Predicted, measured:",
        "",
        "| step, with kernels that repeat their bits | peak, MiB | reserved, MiB | ms "
        "| copied out, MiB | gradients equal |",
        "| --- | --- | --- | --- | --- | --- |",
        "| gpt, unmodified | -, 6 | -, 8 | -, 1.0 | - | - |",
        "| gpt, 60%, recomputing | does not fit | - | - | - | - |",
        "| gpt, 60%, both | 3, 3 | -, 4 | 1.5, 2.0 | 5 | 7 of 7 |",
    ]


def test_errors_of_compiled_steps_are_no_figures() -> None:
    kept = {"models": {"gpt": {"40%": {"error": "BudgetError: nothing fits"}}}}
    assert gpu_page.compiled(kept)[2] == "| gpt, plan for 40% | failed | - | - | - |"
