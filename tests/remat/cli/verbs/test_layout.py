"""`--layout` of run: a file that `simulate` accepts for the kept plan, and one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from remat.analysis.plan_figures import place
from remat.schedules.layout import Layout, buffers_of, check_layout
from remat.schedules.plan import PlanFile
from tests.remat.cli.conftest import Remat
from tests.rows import each_nth

QUICK = ("--budget", "70%", "--time-limit", "600")


@pytest.mark.parametrize("check", each_nth(2, ["--no-check", "--check"]))
def test_the_layout_is_of_the_plan_beside_it(remat: Remat, tmp_path: Path, check: str) -> None:
    plan, layout = tmp_path / "plan.json", tmp_path / "layout.json"
    done = remat("run", remat.gpt, check, *QUICK, "-o", str(plan), "--layout", str(layout))
    assert done.exit_code == 0, done.stderr
    assert f"layout written to {layout}" in done.stderr
    line = r"arena  [\d.]+ [KMG]iB, 0\.\d+ % above the most live bytes"
    assert re.search(line, done.stdout)
    kept, made = PlanFile.from_json(plan.read_bytes()), Layout.from_json(layout.read_bytes())
    assert kept.graph is not None
    check_layout(buffers_of(kept.graph, kept.schedule), made)
    assert made == place(kept.graph, kept.schedule)
    assert made.gap <= 0.01


def test_json_says_all_of_a_layout_but_its_offsets(remat: Remat, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    words = ("run", remat.gpt, *QUICK, "--device", "h100", "--layout", str(path), "--json")
    said = json.loads(remat(*words).stdout)["layout"]
    made = Layout.from_json(path.read_bytes())
    assert said["arena_bytes"] == made.arena_bytes >= said["load_bytes"]
    assert said["alignment_bytes"] == 512
    assert set(said) == {"arena_bytes", "load_bytes", "gap", "alignment_bytes", "placed_by"}


def test_where_nothing_fits_there_is_no_layout(remat: Remat, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    done = remat("run", remat.gpt, "--no-check", "--budget", "1KiB", "--layout", str(path))
    assert done.exit_code == 3
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_refused_before_it_solves(
    remat: Remat, tmp_path: Path
) -> None:
    done = remat(
        "run", remat.gpt, "--no-check", *QUICK, "--layout", str(tmp_path / "none" / "layout.json")
    )
    assert done.exit_code == 2
    assert "solving" not in done.stderr


@pytest.fixture
def kept(remat: Remat, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    words = ("--budget", "70%", "--solver", "dtr", "-o", str(path))
    assert remat("run", remat.gpt, "--no-check", *words).exit_code == 0
    return path


def test_show_places_a_kept_plan(remat: Remat, kept: Path, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    done = remat("show", str(kept), "--layout", str(path))
    assert done.exit_code == 0, done.stderr
    assert "above the most live bytes" in done.stdout
    plan = PlanFile.from_json(kept.read_bytes())
    assert plan.graph is not None
    check_layout(buffers_of(plan.graph, plan.schedule), Layout.from_json(path.read_bytes()))
    without = remat("show", remat.gpt, "--layout", str(path))
    assert without.exit_code == 2
    assert "name a plan" in without.stderr


@pytest.mark.slow
def test_largest_batch_places_the_plan_of_its_answer(remat: Remat, tmp_path: Path) -> None:
    plan, layout = tmp_path / "plan.json", tmp_path / "layout.json"
    words = ("--max-overhead", "0%", "--budget", "1MiB", "--no-check", "--sizes", "2,3", "--most")
    done = remat(
        "largest-batch", remat.gpt, *words, "3", "-o", str(plan), "--layout", str(layout), "--json"
    )
    assert done.exit_code == 0, done.stderr
    of, made = PlanFile.from_json(plan.read_bytes()), Layout.from_json(layout.read_bytes())
    assert of.graph is not None
    check_layout(buffers_of(of.graph, of.schedule), made)
    assert json.loads(done.stdout)["layout"]["arena_bytes"] == made.arena_bytes


def test_sweep_places_each_plan_that_fits(remat: Remat, kept: Path) -> None:
    words = ("sweep", str(kept), "--budgets", "100%,50%", "--solver", "dtr", "--place")
    found = json.loads(remat(*words, "--json").stdout)
    plan = PlanFile.from_json(kept.read_bytes())
    assert plan.graph is not None
    placed = place(plan.graph, plan.schedule).arena_bytes
    for row in found["rows"]:
        assert all((cell["arena_bytes"] > 0) == cell["fits"] for cell in row["cells"])
    of_plan = next(row for row in found["rows"] if row["solver"] == "this plan")
    assert {cell["arena_bytes"] for cell in of_plan["cells"] if cell["fits"]} == {placed}
    shown = remat(*words, columns=120).stdout
    assert shown.count("  arena ") == 3
    without = remat(*words[:-1], "--solver", "full", columns=120).stdout
    assert "this plan" in without
    assert "  arena " not in without


def test_a_report_draws_a_kept_layout_or_makes_one(
    remat: Remat, kept: Path, tmp_path: Path
) -> None:
    layout, page = tmp_path / "layout.json", tmp_path / "report.html"
    assert remat("show", str(kept), "--layout", str(layout)).exit_code == 0
    for words in (("--layout", str(layout)), ("--place",)):
        done = remat("report", str(kept), *words, "--json", "-o", str(page))
        assert done.exit_code == 0, done.stderr
        assert "Addresses in one arena" in page.read_text()
        made = Layout.from_json(layout.read_bytes())
        assert json.loads(done.stdout)["layout"]["arena_bytes"] == made.arena_bytes
    remat("report", str(kept), "-o", str(page))
    assert "Addresses in one arena" not in page.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layout", "other.json"), "the layout was made for another one"),
        (("--layout", "edited.json"), "edited.json: invalid layout: "),
        (("--layout", "plan.json"), "plan.json is not a layout of this release"),
        (("--layout", "none.json"), "none.json"),
        (("--layout", "layout.json", "--place"), "each gives a layout"),
    ],
)
def test_a_layout_that_is_not_of_the_plan_is_refused_with_its_file(
    remat: Remat, kept: Path, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    layout, page = tmp_path / "layout.json", tmp_path / "report.html"
    assert remat("show", str(kept), "--layout", str(layout)).exit_code == 0
    said = json.loads(layout.read_bytes())
    crowded = said | {"offsets_bytes": [0] * len(said["offsets_bytes"])}
    (tmp_path / "edited.json").write_text(json.dumps(crowded))
    (tmp_path / "other.json").write_text(json.dumps(said | {"buffers_hash": "another"}))
    words = tuple(str(tmp_path / one) if one.endswith(".json") else one for one in words)
    done = remat("report", str(kept), *words, "-o", str(page), columns=400)
    assert done.exit_code == 2
    assert says in done.stderr.replace("\n", "")
    assert not page.exists()
