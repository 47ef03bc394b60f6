"""The screen of a run: reserved bytes, predicted and measured, and advice where they are short."""

from __future__ import annotations

import io
import re

import msgspec
import torch
from rich.console import Console
from torch import nn

import remat
from remat.analysis.plan_report import report as remat_report
from remat.budgets import unmodified
from remat.formats import percent_text
from remat.job.pipeline import Report, Row
from remat.job.screen import bound_json, run_screen
from remat.schedules.reserved import AllocatorPeak, Reserved
from remat.schedules.simulate import simulate
from remat.solver.budgets.front import Front, Point
from tests.solver.graphs.random_graphs import chain

GIB = 1 << 30


def shown(device: str, *, is_measured: bool, shortage: str = "") -> str:
    graph = msgspec.structs.replace(chain(4), device=device)
    said = (
        Reserved(AllocatorPeak(GIB, 2 * GIB), AllocatorPeak(GIB, GIB)) if device != "cpu" else None
    )
    measured = 3 * GIB if is_measured else None
    rows = tuple(
        Row(name, GIB, 1.0, 0.0, said, reserved_bytes=measured)
        for name in ("unmodified", "chen_sqrt", "this plan")
    )
    result = unmodified(graph)
    report = Report(graph, result, rows, {}, (), None, shortage=shortage)
    text = io.StringIO()
    Console(file=text, width=200).print(run_screen(report))
    return " ".join(text.getvalue().split())


def test_a_device_that_is_not_here_has_predictions_and_advice() -> None:
    text = shown("h100", is_measured=False, shortage="a step runs out of memory")
    predicted = "2.00 GiB predicted (expandable 1.00 GiB)"
    assert f"reserved {predicted}, unmodified 2.00 GiB (expandable 1.00 GiB) " in text
    assert "advice a step runs out of memory" in text
    assert "measured: " not in text


def test_what_was_measured_stands_below_what_was_predicted() -> None:
    text = shown("cuda", is_measured=True)
    measured = (
        "measured: unmodified 3.00 GiB, square-root checkpointing 3.00 GiB, this plan 3.00 GiB"
    )
    assert f"(expandable 1.00 GiB) {measured}" in text


def test_where_nothing_is_proved_everything_that_shows_a_bound_says_so() -> None:
    graph = chain(4)
    result = msgspec.structs.replace(unmodified(graph), lower_bound_us=0.0)
    assert result.gap is None
    report = Report(graph, result, (Row("unmodified", GIB, 1.0, 0.0),), {}, (), None)
    text = io.StringIO()
    Console(file=text, width=200).print(run_screen(report))
    words = " ".join(text.getvalue().split())
    assert "lower bound no bound " in words
    assert "gap 0" not in words
    unknown = {"lower_bound_us": None, "overhead": None, "gap": None}
    assert bound_json(graph, result) == unknown
    front = Front("", graph.hash, "auto", graph.time_us, 0, 0, (Point(GIB, result),))
    htmls = (result._repr_html_(), front._repr_html_())
    for said in (repr(result), repr(front), *htmls, remat_report(graph, result)):
        assert "no bound" in said
        assert "gap 0" not in said
    assert bound_json(graph, unmodified(graph))["gap"] == 0.0


def test_a_bound_that_needs_no_proof_is_told_apart() -> None:
    graph = chain(12)
    result = remat.solve(graph, "min", "chen_sqrt")
    assert result.overhead > 0
    report = Report(graph, result, (Row("unmodified", GIB, 1.0, 0.0),), {}, (), None)
    text = io.StringIO()
    Console(file=text, width=200).print(run_screen(report))
    gap = percent_text(result.overhead)
    assert f"0.0 % overhead (nothing computed twice); gap {gap}" in text.getvalue()


def test_a_cpu_reserves_nothing() -> None:
    assert "reserved" not in shown("cpu", is_measured=False)


def test_what_holds_the_peak_is_told_by_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    graph = remat.capture(model, (torch.randn(4, 8),), device="h100")
    result = unmodified(graph)
    assert result.schedule is not None
    rows = tuple(Row(name, GIB, 1.0, 0.0) for name in ("unmodified", "chen_sqrt", "this plan"))
    simulation = simulate(graph, result.schedule)
    text = io.StringIO()
    report = Report(graph, result, rows, {}, (), None, simulation=simulation)
    Console(file=text, width=200).print(run_screen(report))
    (line,) = (line for line in text.getvalue().splitlines() if line.startswith("peak held by"))
    values = {value.name for value in graph.values}
    assert re.search(r" [012] \d", line)
    assert not values & set(re.findall(r"[\w.]+", line))
