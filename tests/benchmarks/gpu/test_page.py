"""What the docs say of a GPU is what the kept files and rows say, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import page
from benchmarks.gpu.rows import RowFile
from benchmarks.gpu.visit import groups_of
from benchmarks.solver_table import replaced

VISIT: dict[str, Any] = {
    "row": "visit/1", "device": "A card", "versions": {"torch": "2.13.0"}, "date": "2026-11-26",
}  # fmt: skip
STEP = {
    "peak_bytes": 3 << 30, "reserved_bytes": 4 << 30, "step_us": 2000.0, "eager_us": 1500.0,
    "gradients": 7, "gradients_equal": 6, "gradients_off_by": 0.012,
}  # fmt: skip
PLANNED = {
    "predicted_peak_bytes": 3 << 30, "predicted_reserved_bytes": 5 << 30,
    "predicted_step_us": 1900.0,
}  # fmt: skip


def folder_with(folder: Path, *rows: dict[str, Any]) -> Path:
    for row in (VISIT, *rows):
        RowFile(folder / "rows.jsonl").append(row)
    return folder


def test_the_pages_are_those_of_the_files() -> None:
    for path, lines in ((page.PAGE, page.lines_of()), (page.README, page.readme_lines())):
        text = path.read_text()
        assert replaced(text, page.MARKER, lines) == text


def test_every_kind_of_row_has_its_part() -> None:
    kinds = {
        unit.key.partition("/")[0] for one in groups_of(1, rehearse=False) for unit in one.units
    }
    assert kinds == {*page.OF_ROWS, "visit", "profiles"}
    assert {path.stem for path in page.RESULTS.glob("*.json")} <= set(page.PARTS)


def test_rows_of_the_table_stand_beside_what_was_predicted(tmp_path: Path) -> None:
    folder_with(
        tmp_path,
        {"row": "table/gpt/unmodified", "error": "ValueError: no"},
        {"row": "table/gpt/plan 80%", "status": "infeasible", "message": "nothing fits"},
        {"row": "table/gpt/plan 70%", "status": "none found", "message": "a rule alone"},
        {"row": "table/gpt/save_on_cpu", "out_of_memory": "no room"},
        {"row": "table/gpt/plan 60%", **STEP, **PLANNED},
    )
    assert page.lines_of(tmp_path) == [
        "A card, torch 2.13.0; 2026-11-26. Predicted, measured:",
        "",
        "| step under bfloat16 autocast | peak, MiB | reserved, MiB | ms | unmodified, ms "
        "| gradients equal |",
        "| --- | --- | --- | --- | --- | --- |",
        "| gpt, unmodified | failed | - | - | - | - |",
        "| gpt, plan 80% | does not fit | - | - | - | - |",
        "| gpt, plan 70% | none found | - | - | - | - |",
        "| gpt, save_on_cpu | does not fit | - | - | - | - |",
        "| gpt, plan 60% | 3,072, 3,072 | 5,120, 4,096 | 1.9, 2.0 | 1.5 | 6 of 7 |",
    ]


def test_what_is_not_in_the_rows_is_not_on_the_page(tmp_path: Path) -> None:
    assert page.readme_lines(tmp_path) == []
    folder_with(tmp_path, {"row": "profiles/gpt", "ops": 3})
    assert page.lines_of(tmp_path) == ["A card, torch 2.13.0; 2026-11-26. Predicted, measured:"]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"row": "ceilings/copy", "gb_s": 4300.0}, "| a copy, read and written | 4.30 TB/s |"),
        (
            {"row": "ceilings/product", "tflop_s": 790.2, "width": 8192},
            "| a bfloat16 product of width 8,192 | 790 TFLOP/s |",
        ),
        ({"row": "levers/NVMe", **STEP}, "| NVMe | -, 3,072 | 6 of 7 |"),
        ({"row": "levers/NVMe", "error": "no"}, "| NVMe | failed | - |"),
        (
            {"row": "compiled/gpt/torch.compile", **STEP},
            "| gpt, torch.compile | -, 3,072 | -, 4,096 | -, 2.0 | 1.5 | 1.2 % |",
        ),
        (
            {"row": "demo/unmodified", "out_of_memory": "no"},
            "| unmodified | does not fit | - | - | - |",
        ),
    ],
)
def test_other_rows_are_lines_of_tables(row: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert page.lines_of(folder_with(tmp_path, row))[-1] == line


def test_the_readme_has_models_that_were_measured_whole(tmp_path: Path) -> None:
    whole = [{"row": f"table/gpt/{name}", **STEP} for name in page.SHOWN]
    part = [{"row": "table/llama/unmodified", **STEP}]
    assert page.readme_lines(folder_with(tmp_path, *whole, *part)) == [
        "| A card | unmodified | every block checkpointed | plan 60% |",
        "| --- | --- | --- | --- |",
        "| gpt | 3.0 GiB, 2 ms | 3.0 GiB, 2 ms | 3.0 GiB, 2 ms |",
    ]


def test_errors_of_compiled_steps_are_no_figures() -> None:
    kept = {"models": {"gpt": {"40%": {"error": "BudgetError: nothing fits"}}}}
    assert page.compiled(kept)[2] == "| gpt, plan for 40% | failed | - | - | - |"
