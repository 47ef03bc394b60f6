"""The comparison of training steps: a run of its smallest suite, and the page made of results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training
from benchmarks.comparison import document
from benchmarks.comparison.batches import METHODS, largest
from benchmarks.comparison.bench import Bench
from benchmarks.comparison.compared import TITLES, UPDATED, Model, models_of, overhead_off, title
from benchmarks.comparison.fronts import (
    TORCHS_KEPT,
    Row,
    beside,
    best_beside,
    best_within,
    front,
    fronts,
    targets,
)
from benchmarks.comparison.methods import Variant
from benchmarks.comparison.models import SUITES
from benchmarks.comparison.page.causes import cause
from benchmarks.comparison.page.front_plot import INKS, panels
from benchmarks.comparison.row import GRADIENTS

ROOT = Path(__file__).parents[3]
MODEL = "gpt2-tiny"


def row(method: str, peak: int, over: float, amount: float = 0, **more: Any) -> Row:
    return Row(method, amount, {"peak_bytes": peak, "over_eager": over, **more})


def suite(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.training", "--suite", "smoke", "--out", str(out)]
    # The first schedule is enough, however long a busy machine takes to find it.
    command += ["--solve-seconds", "300", "--gap", "9", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("training") / "new" / "results.json"
    suite(out)
    return out


@pytest.mark.slow
def test_every_row_is_measured_or_does_not_apply(results: Path) -> None:
    rows = json.loads(results.read_text())["rows"][MODEL]
    missing = {name: kept for name, kept in rows.items() if "peak_bytes" not in kept}
    assert all(kept["does_not_apply"] for kept in missing.values())
    assert missing["sac_ilp"]["error"] == "its estimators of time need CUDA"
    ours = ("remat ", "remat_host ")
    others = {name: kept["error"] for name, kept in missing.items() if not name.startswith(ours)}
    assert others.keys() == {"sac_ilp"}, others
    methods = {name.split()[0] for name in rows}
    assert methods == {*TITLES, TORCHS_KEPT}


@pytest.mark.slow
def test_ours_keep_to_the_peaks_they_were_given_and_are_right(results: Path) -> None:
    rows = json.loads(results.read_text())["rows"][MODEL]
    ours = {name: kept for name, kept in rows.items() if name.startswith("remat")}
    ours = {name: kept for name, kept in ours.items() if "error" not in kept}
    methods = {name.split()[0] for name in ours}
    assert methods == {"remat", "remat_pieces", "remat_host", "remat_step", "remat_compiled"}
    for kept in ours.values():
        assert kept["peak_bytes"] <= kept["budget_bytes"]
        assert abs(kept["predicted_bytes"] / kept["peak_bytes"] - 1) < 0.02
    assert all(kept["is_right"] for kept in ours.values())
    assert all(kept["gradient_error"] == 0 for n, kept in ours.items() if n.startswith("remat "))


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(results: Path) -> None:
    before = json.loads(results.read_text())["rows"]
    assert suite(results).stdout == ""
    assert json.loads(results.read_text())["rows"] == before


@pytest.mark.slow
def test_a_row_without_what_judges_its_gradients_has_that_measured_anew(results: Path) -> None:
    kept = json.loads(results.read_text())
    before = dict(kept["rows"][MODEL])
    lost = next(name for name in before if name.startswith("inductor "))
    del kept["rows"][MODEL][lost]
    results.write_text(json.dumps(kept))
    (training.WORK / "smoke" / MODEL / GRADIENTS).unlink()
    printed = [line[13:41].strip() for line in suite(results).stdout.splitlines()]
    # They run side by side, and either may end first.
    assert sorted(printed) == sorted([TORCHS_KEPT, lost])
    after = json.loads(results.read_text())["rows"][MODEL]
    assert after.keys() == before.keys()
    assert after[lost]["is_right"] == before[lost]["is_right"]
    assert all(after[name] == before[name] for name in before.keys() - {lost, TORCHS_KEPT})


@pytest.mark.slow
def test_every_row_is_printed_and_the_page_has_its_picture(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = json.loads(results.read_text())
    monkeypatch.setattr(document, "PAGE", results.with_name("benchmarks.md"))
    document.part("smoke", kept)
    for model in models_of("smoke", kept["rows"]):
        text = "\n".join(document.section(model))
        for row in model.rows:
            assert f"| {title(row)} | {row.peak_bytes / 1e6:.1f} |" in text
    light, dark = (results.parent / "pictures" / f"benchmarks-smoke-{s}.svg" for s in INKS)
    assert min(light.stat().st_size, dark.stat().st_size) > 10_000


@pytest.mark.clock
@pytest.mark.slow
def test_the_largest_batches_fit_and_are_on_the_page(results: Path) -> None:
    printed = suite(results, "--batches").stdout.splitlines()
    kept = json.loads(results.read_text())
    budget_bytes = kept["rows"][MODEL]["eager"]["peak_bytes"]
    found = kept["batches"][MODEL][str(budget_bytes)]
    assert len(printed) == len(found) == len(METHODS)
    assert found["eager"]["batch"] == SUITES["smoke"][MODEL].batch
    assert all(one["peak_bytes"] <= budget_bytes for one in found.values())
    assert found["remat 0.3"]["batch"] >= found["remat 0.1"]["batch"] >= found["eager"]["batch"]
    assert suite(results, "--batches").stdout == ""
    models = models_of("smoke", kept["rows"])[:1]
    *_, line = document.batches(models, kept)
    assert line.endswith(f"| {found['remat 0.3']['batch']} |")


def test_a_front_has_no_row_that_another_beats() -> None:
    rows = [row("a", 10, 0.5), row("b", 20, 0.2), row("c", 20, 0.3), row("d", 30, 0.2)]
    assert [r.method for r in front(rows)] == ["b", "a"]
    assert best_within(rows, 19) == rows[0]
    assert best_within(rows, 9) is None
    assert targets(rows, [2000, 10]) == [2000, 30, 20, 10]


def lost() -> dict[str, Any]:
    kept = {
        "eager": {"peak_bytes": 100, "over_eager": 0.0, "setup_s": 0.0},
        "checkpoint 1": {"peak_bytes": 50, "over_eager": 0.1, "setup_s": 0.0},
        "remat 100": {
            "peak_bytes": 50, "over_eager": 0.2, "setup_s": 1.0, "predicted_bytes": 50,
            "planned_overhead": 0.2, "measured_overhead": 0.2, "gap": 0.0,
        },
    }  # fmt: skip
    return {
        "rows": {MODEL: kept}, "device": "x", "torch": "2", "python": "3", "date": "d",
        "commit": "c", "seconds": 60.0,
    }  # fmt: skip


def test_lost_rows_have_the_cause_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "PAGE", tmp_path / "page.md")
    text = "\n".join(document.part("smoke", lost()))
    planned = "this peak costs ours +20.0%, as planned; gap 0.0%"
    line = f"| {MODEL} | checkpoint, every 1, 0.0 MB | **remat** | +9.1 % | {planned} |"
    assert line in text
    assert f"| {MODEL} | unmodified, 0.0 MB | **remat** | +20.0 % | {planned} |" in text
    lowest = "| 0.0 | checkpoint, every 1 | 0.0, +10.0 % | **remat** | 0.0, +20.0 % |"
    assert f"| {MODEL} {lowest}" in text


def test_the_page_is_that_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = document.PAGE.read_text()
    monkeypatch.setattr(document, "PAGE", tmp_path / "page.md")
    assert document.page() == kept


def test_a_model_without_rows_of_the_picture_has_no_panel() -> None:
    assert list(panels({"plain": [row("eager", 9, 0.0)], "updated": [row("adamw", 9, 0.0)]})) == [
        "plain"
    ]


@pytest.mark.parametrize(
    ("over", "planned", "measured", "said"),
    [
        (0.20, 0.20, 0.20, "this peak costs ours +20.0%, as planned; gap 1.0%"),
        (0.30, 0.05, 0.30, "+25.0% more than planned"),
        (0.32, 0.10, 0.10, "+20.0% before recomputation"),
    ],
)
def test_the_largest_part_is_the_cause(
    over: float, planned: float, measured: float, said: str
) -> None:
    facts = {"planned_overhead": planned, "measured_overhead": measured, "gap": 0.01}
    assert cause(row("checkpoint", 50, 0.1), row("remat", 50, over, **facts), 40) == said


def test_causes_without_a_plan_of_ours() -> None:
    theirs = row("inductor", 50, 0.1)
    assert cause(theirs, None, 60_000_000) == "none of ours is so low, the least is 60.0 MB"
    assert cause(theirs, None, None) == "none of ours is so low"
    assert cause(row("aot", 50, 0.1, is_right=False), None, 1) == "its gradients are wrong"
    bare = row("remat_step", 50, 0.2)
    assert cause(theirs, bare, 50) == "what our step takes without a plan was not measured"


def test_memory_of_the_host_is_compared_with_its_like() -> None:
    plain, host = row("checkpoint", 50, 0.4), row("save_on_cpu", 40, 0.3)
    ours = [row("remat", 50, 0.2), row("remat_host", 40, 0.1)]
    assert fronts([host, plain]) == [plain, host]
    assert best_beside(ours, plain) == ours[0]
    assert beside(ours, plain) == ours[:1]
    assert beside(ours, host) == ours
    assert best_beside(ours, host) == ours[1]
    assert best_beside(ours[:1], row("offload", 60, 0.3)) == ours[0]


def test_steps_with_an_update_are_a_model_of_their_own() -> None:
    kept = {
        MODEL: {"eager": {"error": "x"}, "adamw": {"error": "x"}, "remat_step 9": {"error": "x"}}
    }
    plain, updated = models_of("smoke", kept)
    assert (plain.name, updated.name) == (MODEL, MODEL + UPDATED)
    assert [row.name for row in updated.failed] == ["adamw", "remat_step 9"]
    assert plain.description()
    assert not updated.description()


def test_overheads_are_held_against_the_kept_step_of_the_same_row() -> None:
    kept = {
        TORCHS_KEPT: {"peak_bytes": 9, "over_eager": 0.32},
        "remat_compiled 7": {
            "peak_bytes": 9, "over_eager": 0.32, "planned_overhead": 0.11, "measured_overhead": 0.1,
        },
    }  # fmt: skip
    model = Model("smoke", MODEL, kept)
    assert [row.name for row in model.rows] == ["remat_compiled 7"]
    assert round(overhead_off(model.rows[0]), 9) == 0.01


def test_a_row_lost_by_no_more_than_the_noise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "PAGE", tmp_path / "page.md")
    kept = lost()
    kept["rows"][MODEL]["remat 100"]["over_eager"] = 0.01
    lines = document.part("smoke", kept)
    assert "None." in lines
    assert "\nOthers are faster by at most 2 % in 1 more." in lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"suite": "cpu"}', "holds the suite cpu, not smoke"),
        ("{", "holds no results"),
        ("[]", "holds no results"),
        ('{"rows": {}}', "holds no results"),
    ],
)
def test_a_file_of_something_else_is_refused(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.json"
    out.write_text(text)
    monkeypatch.setattr(sys, "argv", ["training", "--suite", "smoke", "--out", str(out)])
    with pytest.raises(SystemExit, match=said):
        training.main()
    assert out.read_text() == text


def test_a_run_out_of_minutes_leaves_rows_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.json"
    asked = ["training", "--suite", "smoke", "--out", str(out), "--minutes", "0"]
    monkeypatch.setattr(sys, "argv", asked)
    monkeypatch.setattr(training, "WORK", tmp_path)
    assert training.main() == training.LEFT_OVER
    assert not out.exists()


def test_levers_are_measured_at_the_peaks_of_their_like(tmp_path: Path) -> None:
    peaks = {"offload 2": 900, "save_on_cpu": 500, "chunked 4": 700, "adamw_in_backward": 1000}
    kept = {name: {"peak_bytes": peak, "over_eager": 1 / peak} for name, peak in peaks.items()}
    kept["chunked 16"] = {"error": "its loss is not over tokens", "does_not_apply": True}
    results = training.Results(tmp_path / "results.json", {"rows": {MODEL: kept}})
    suite = training.Suite("smoke", results, math.inf, 10, 1e-3)
    found = {ours: suite.peaks_beside(MODEL, ours) for ours in training.BESIDE}
    assert found == {
        "remat_host": [900, 500], "remat_pieces": [700], "remat_step": [1000, 600],
    }  # fmt: skip


def test_steps_are_timed_in_both_orders_after_the_unmodified_one() -> None:
    bench, ran = Bench(SUITES["smoke"][MODEL].make(), "cpu"), list[str]()

    def variant(name: str) -> Variant:
        def call(*args: Any) -> Any:
            ran.append(name)
            return bench.trainee.model(*args)

        return Variant(call)

    measure = bench.rounds(variant("eager"), variant("plan"), variant("kept"))
    ran.clear()
    taken = [measure() for _ in range(4)]
    assert all(len(each) == 3 and min(each) > 0 for each in taken)
    assert ran == 2 * ["eager", "plan", "kept", "eager", "kept", "plan"]


@pytest.mark.parametrize(("first", "guess"), [(4, 4), (4, 37), (4, 36), (4, 200), (50, 60), (4, 0)])
def test_the_largest_batch_is_found_from_any_guess(first: int, guess: int) -> None:
    tried: list[int] = []

    def holds(size: int) -> bool:
        tried.append(size)
        return size <= 37

    assert largest(holds, first, guess) == 37
    assert len(tried) == len(set(tried)) < 20


def test_no_batch_holds() -> None:
    assert largest(lambda size: False, 4, 4) == 0
