"""A small GPT, captured once, and a plan of it; and a browser, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from remat.analysis.plan_report import page_facts
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.report.page_facts import PageFacts
from remat.schedules.schedule import Schedule
from remat.solver import solve_within
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.graphs.traced_gpt import traced_gpt

REQUIRED = "REMAT_REQUIRE_BROWSER"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Planned(NamedTuple):
    """A graph, and a plan of it that computes some ops again."""

    graph: TrainingGraph
    result: Result

    @property
    def schedule(self) -> Schedule:
        assert self.result.schedule is not None
        return self.result.schedule

    @property
    def facts(self) -> PageFacts:
        return page_facts(self.graph, self.result)


@pytest.fixture(scope="session")
def planned() -> Planned:
    graph = traced_gpt("written out")
    result = solve_within(graph, int(0.7 * peak_bytes_of(graph)), "cut", time_limit_s=AMPLE_S)
    assert result.schedule is not None
    assert max(result.schedule.computations().values()) > 1
    return Planned(graph, result)


@pytest.fixture(scope="session")
def browser_path() -> Path:
    """The browser; a test without one is skipped, unless it is required, as CI does."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, and none of {', '.join(BROWSERS)} is installed")
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return Path(found)


@pytest.fixture(scope="session")
def browser(browser_path: Path) -> Iterator[object]:
    if not os.environ.get(REQUIRED):
        pytest.importorskip("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=str(browser_path), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()
