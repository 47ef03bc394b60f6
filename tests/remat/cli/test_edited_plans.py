"""Figures of a plan file that somebody edited: each verb refuses them, or proves none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from remat.cli.main import app
from remat.graph_capture.errors import PlanError
from remat.job.factory import Loaded
from remat.job.plan_source import fitting_schedule
from tests.files.kinds import GRAPH, plan

VERBS = {
    "show": ("show", "PLAN"),
    "explain": ("show", "PLAN", "--explain", "--each-limit", "0.1"),
    "report": ("report", "PLAN", "-o", "OUT"),
    "sweep": (
        "sweep", "PLAN", "--budgets", "90%", "--solver", "chen_sqrt", "--solver", "full",
    ),
}  # fmt: skip
MADE = plan()
assert MADE.prediction is not None
PEAK = MADE.prediction.peak_bytes
CLAIMS = re.compile(r", proved|gap 0\.0+ %|optimal, by")
EDITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a lower peak": ({"peak_bytes": PEAK - 1}, {}, "it says peak_bytes"),
    "a shorter time": ({"time_us": 1.0}, {}, "it says time_us"),
    "less overhead": ({"overhead": 0.0}, {}, "it says overhead"),
    "a bound above the time": ({"lower_bound_us": 1e12}, {}, "it says lower_bound_us"),
    "no gap": ({"gap": 0.0}, {}, "it says gap"),
    "a lower budget": ({}, {"budget_bytes": PEAK - 1}, "above its budget"),
}


def edited(path: Path, prediction: dict[str, Any], schedule: dict[str, Any]) -> Path:
    root = json.loads(MADE.to_json())
    root["prediction"] |= prediction
    root["schedule"] |= schedule
    path.write_text(json.dumps(root))
    return path


def said(words: tuple[str, ...], path: Path) -> tuple[int, str, str]:
    named = {"PLAN": str(path), "OUT": str(path.with_name("out.html"))}
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [named.get(word, word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize(("prediction", "schedule", "says"), EDITS.values(), ids=EDITS)
def test_edited_figures_are_refused(
    words: tuple[str, ...],
    prediction: dict[str, Any],
    schedule: dict[str, Any],
    says: str,
    tmp_path: Path,
) -> None:
    path = edited(tmp_path / "plan.json", prediction, schedule)
    code, out, err = said(words, path)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert str(path) in err
    assert says in err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_a_bound_that_a_file_states_is_not_shown_as_proved(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    assert MADE.prediction is not None
    best = {"lower_bound_us": MADE.prediction.time_us, "gap": 0.0}
    code, out, err = said(words, edited(tmp_path / "plan.json", best, {}))
    assert code == 0, err
    page = tmp_path / "out.html"
    shown = out + (page.read_text() if page.exists() else "")
    # Where a bound of the plan is shown, and nowhere else.
    assert ("a file proves nothing" in err) is ("--explain" in words)
    assert ("a file proves nothing" in shown) is (words[0] == "report")
    # The page opens with the verdict of whoever made the file; all else says whose claim it is.
    quoted = [line for line in shown.splitlines() if CLAIMS.search(line)]
    assert len(quoted) == (2 if words[0] == "report" else 0)
    assert all(
        line.startswith("<h1>") or "as the plan&#39;s file states" in line for line in quoted
    )


def test_check_and_rewrite_judge_a_plan_first() -> None:
    """Before they look at the model."""
    wrong = msgspec.structs.replace(MADE.prediction, peak_bytes=PEAK - 1)  # type: ignore[type-var]
    kept = msgspec.structs.replace(MADE, prediction=wrong)
    with pytest.raises(PlanError, match=r"p\.json was edited, or is stale: it says peak_bytes"):
        fitting_schedule(kept, Loaded(None, ()), "p.json")  # type: ignore[arg-type]


def test_a_representation_shows_no_figure_of_a_file() -> None:
    assert str(PEAK) not in repr(MADE)
    assert GRAPH.hash[:12] in repr(MADE)
