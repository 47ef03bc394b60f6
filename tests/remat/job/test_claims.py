"""What a run prints of each solver on each example, held against the simulator.

Steps are modelled on a GPU, so that their costs are the same everywhere. No assertion hangs on
where a time limit ends a search: it limits the work alone.
"""

from __future__ import annotations

import functools
import importlib
import io
from typing import Any

import pytest
from rich.console import Console

import remat
from remat.budgets import unmodified_step
from remat.formats import NO_BOUND, bytes_text, percent_text
from remat.graph_capture.graph import TrainingGraph
from remat.job.pipeline import Report, planned_report
from remat.job.request import Request
from remat.job.screen import report_json, run_screen
from remat.progress import Stopwatch
from remat.schedules.derived import graph_of_schedule
from remat.schedules.outcome import Result
from remat.schedules.reserved import reserved_of
from remat.schedules.simulate import simulate
from remat.solver.table import NEEDS_LINKS, TABLE, TAKE_CHUNKS

DEVICE, BUDGETS, LIMIT_S = "h100", ("min", "60%", "85%"), 0.25
# Other examples train the models of these.
SIZES = {
    "gpt": {"GPT_LAYERS": "2", "GPT_WIDTH": "64", "GPT_HEADS": "2", "GPT_VOCAB": "8192"},
    "llama": {
        "LLAMA_LAYERS": "1", "LLAMA_WIDTH": "64", "LLAMA_HEADS": "2", "LLAMA_KV_HEADS": "2",
        "LLAMA_HIDDEN": "512", "LLAMA_SEQ": "256", "LLAMA_VOCAB": "8192",
    },
    "resnet": {"RESNET_WIDTH": "8", "RESNET_BATCH": "16"},
    "unet": {"UNET_WIDTH": "4", "UNET_BATCH": "2", "UNET_IMAGE": "32"},
}  # fmt: skip
QUICK = {("gpt", "auto"), ("gpt", "norms_and_activations"), ("resnet", "full"), ("unet", "auto")}
LARGE_PROGRAMS = ("checkmate", "lp_rounding")
"""They take minutes to set up programs for graphs of more than a hundred ops."""
CASES = [
    pytest.param(name, solver, marks=[] if (name, solver) in QUICK else pytest.mark.slow)
    for name in SIZES
    for solver in TABLE
    if solver not in (*NEEDS_LINKS, "exhaustive")  # these take none of the graphs
    if name == "gpt" or solver not in LARGE_PROGRAMS
]


@functools.cache
def captured(name: str) -> TrainingGraph:
    with pytest.MonkeyPatch.context() as patch:
        for variable, size in SIZES[name].items():
            patch.setenv(variable, size)
        made: dict[str, Any] = importlib.import_module(f"examples.{name}").factory()
    model, args = made.pop("model"), made.pop("args")
    return remat.capture(model, args, device=DEVICE, **made)


def run(name: str, solver: str, budget: str) -> Report:
    asked = Request(budget=budget, solver=solver, device=DEVICE, time_limit_s=LIMIT_S)
    return planned_report(captured(name), asked, Stopwatch())[0]


def screen(report: Report) -> str:
    text = io.StringIO()
    Console(file=text, width=400).print(run_screen(report))
    return "\n".join(" ".join(line.split()) for line in text.getvalue().splitlines())


@pytest.mark.parametrize(("name", "solver"), CASES)
def test_what_is_printed_is_what_the_judge_says(name: str, solver: str) -> None:
    for budget in BUDGETS:
        report = run(name, solver, budget)
        require_rows_of_the_judge(report)
        require_a_bound_or_none(report)
        if report.result.schedule is None:
            require_least_of_the_judge(report.graph, report.result)
        if solver not in TAKE_CHUNKS and report.result.schedule is not None:
            assert report.result.schedule.chunks == ()
        elif budget == "min" and solver in TAKE_CHUNKS:
            assert report.result.peak_bytes <= min(row.peak_bytes for row in report.rows)


def require_rows_of_the_judge(report: Report) -> None:
    """Peaks, times and reserved bytes of all rows, and the plan's line."""
    said, text = report_json(report), screen(report)
    eager, plan = unmodified_step(report.graph), report.result.schedule
    assert eager.result.schedule is not None
    steps = {"baseline": (eager.graph, eager.result.schedule)}
    if plan is not None:
        steps["plan"] = graph_of_schedule(report.graph, plan), plan
    for row, (graph, schedule) in steps.items():
        found, reserved = simulate(graph, schedule), reserved_of(graph, schedule)
        assert said[row]["predicted_peak_bytes"] == found.peak_bytes
        assert said[row]["predicted_step_us"] == found.time_us
        kept_bytes = reserved.default.reserved_bytes
        assert said[row]["predicted_reserved"]["default"]["reserved_bytes"] == kept_bytes
        assert bytes_text(found.peak_bytes).split()[0] in text
        assert plan is None or bytes_text(kept_bytes) in text


def require_a_bound_or_none(report: Report) -> None:
    """The bound is below what any row takes within the budget, and the gap is the plan's to it."""
    said, result, text = report_json(report)["bound"], report.result, screen(report)
    bound_us = said["lower_bound_us"]
    if bound_us is None:
        assert (said["overhead"], said["gap"]) == (None, None)
        assert f"lower bound {NO_BOUND}\n" in text
        return
    assert bound_us > 0
    if result.schedule is None:
        assert said["gap"] is None
        assert f"lower bound {NO_BOUND}\n" in text
        return
    fitting = [row.time_us for row in report.rows if row.peak_bytes <= result.budget_bytes]
    assert bound_us <= min([*fitting, result.time_us]) * (1 + 1e-9)
    plan_us = simulate(report.graph, result.schedule).time_us
    assert said["gap"] == pytest.approx(plan_us / bound_us - 1)
    assert f"gap {percent_text(said['gap'])}" in text


def require_least_of_the_judge(graph: TrainingGraph, result: Result) -> None:
    """The least budget that is named is the peak of a schedule."""
    least = result.least_schedule
    if least is not None:
        found = simulate(graph_of_schedule(graph, least), least)
        assert found.peak_bytes == result.least_feasible_bytes > result.budget_bytes
