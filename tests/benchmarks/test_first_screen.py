"""The README's first screen shows committed results, and a plan that keeps to its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.first_screen import INK, MIB, README, draw, planned, written_into
from remat.budgets import unmodified
from remat.schedules.simulate import simulate

MOST_LINES = 120


def test_the_table_of_the_readme_is_that_of_the_results() -> None:
    text = README.read_text()
    assert written_into(text) == text


def test_the_readme_is_a_first_screen() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
def test_the_picture_shows_a_plan_below_its_budget(tmp_path: Path) -> None:
    graph, schedule = planned()
    peak_bytes = simulate(graph, schedule).peak_bytes
    assert peak_bytes <= schedule.budget_bytes < unmodified(graph).peak_bytes
    draw(graph, schedule, tmp_path / "step.svg", INK["dark"])
    kept = [README.with_name("docs") / "pictures" / f"step-{theme}.svg" for theme in INK]
    assert all(path.stat().st_size < MIB for path in kept)
    assert (tmp_path / "step.svg").read_bytes() == kept[1].read_bytes()
