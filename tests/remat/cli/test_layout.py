"""`--layout` of run and solve: a file that the judge accepts for the kept plan, and one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import remat as api
from remat.schedules.buffers import buffers_of
from remat.schedules.layout import Layout, check_layout
from remat.schedules.plan import Plan
from tests.remat.cli.conftest import Remat

QUICK = ("--budget", "70%", "--time-limit", "600")


@pytest.mark.parametrize("verb", ["solve", "run"])
def test_the_layout_is_of_the_plan_beside_it(remat: Remat, tmp_path: Path, verb: str) -> None:
    plan, layout = tmp_path / "plan.json", tmp_path / "layout.json"
    done = remat(verb, remat.gpt, *QUICK, "-o", str(plan), "--layout", str(layout))
    assert done.exit_code == 0, done.stderr
    assert f"layout written to {layout}" in done.stderr
    line = r"arena  [\d.]+ [KMG]iB, 0\.\d+ % above the most live bytes"
    assert re.search(line, done.stdout)
    kept, made = Plan.from_json(plan.read_bytes()), Layout.from_json(layout.read_bytes())
    assert kept.graph is not None
    check_layout(buffers_of(kept.graph, kept.schedule), made)
    assert made == api.place(kept.graph, kept.schedule)
    assert made.gap <= 0.01


def test_json_says_all_of_a_layout_but_its_offsets(remat: Remat, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    words = ("solve", remat.gpt, *QUICK, "--device", "h100", "--layout", str(path), "--json")
    said = json.loads(remat(*words).stdout)["layout"]
    made = Layout.from_json(path.read_bytes())
    assert said["arena_bytes"] == made.arena_bytes >= said["load_bytes"]
    assert said["alignment_bytes"] == 512
    assert set(said) == {"arena_bytes", "load_bytes", "gap", "alignment_bytes", "placed_by"}


def test_where_nothing_fits_there_is_no_layout(remat: Remat, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    done = remat("solve", remat.gpt, "--budget", "1KiB", "--layout", str(path))
    assert done.exit_code == 3
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_refused_before_it_solves(
    remat: Remat, tmp_path: Path
) -> None:
    done = remat("solve", remat.gpt, *QUICK, "--layout", str(tmp_path / "none" / "layout.json"))
    assert done.exit_code == 2
    assert "solving" not in done.stderr
