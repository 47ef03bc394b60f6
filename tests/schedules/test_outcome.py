"""The verdict: what is known of a plan, in one line, and no more."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

import remat
from remat.analysis.plan_report import page_facts, report
from remat.budgets import unmodified
from remat.formats import bytes_text, percent_text
from remat.schedules.outcome import Check, verdict
from remat.solver import solve_within
from tests.files.kinds import GRAPH
from tests.schedules.conftest import Planned

MIB = 1 << 20
FOUND = msgspec.structs.replace(
    unmodified(GRAPH), status="feasible", budget_bytes=200 * MIB, time_us=110.0,
    lower_bound_us=0.0,
)  # fmt: skip
"""A step of 100 us takes 110 us."""
CHECK = Check(True, True, True, True, 76, 76, 330 * MIB, 199 * MIB, 100.0, 104.0)


def said(check: Check | None = CHECK, changed: Any = None, **found: Any) -> str:
    graph = msgspec.structs.replace(GRAPH, **(changed or {}))
    result = msgspec.structs.replace(FOUND, **found)
    return verdict(graph, 100.0, result, check)


def checked(**changes: Any) -> Check:
    return msgspec.structs.replace(CHECK, **changes)


def with_gap(gap: float) -> dict[str, Any]:
    """A plan that far above a bound that is more than each op once."""
    bound_us = 2 * GRAPH.time_us
    return {"lower_bound_us": bound_us, "time_us": bound_us * (1 + gap)}


@pytest.mark.parametrize(
    ("check", "tells"),
    [
        (None, "Predicted to fit 200.0 MiB, 10.0 % slower than unmodified. Not run."),
        (
            CHECK,
            "Fits 200.0 MiB. 10.0 % slower than unmodified (measured: 4.0 %). "
            "76 of 76 gradients equal.",
        ),
        (
            checked(plan_peak_bytes=201 * MIB, baseline_step_us=0.0, plan_step_us=0.0),
            "Takes 201.0 MiB, above the budget of 200.0 MiB. 10.0 % slower than unmodified. "
            "76 of 76 gradients equal.",
        ),
        (
            checked(gradients=75, gradients_equal=False, rng_equal=False),
            "Fits 200.0 MiB. 10.0 % slower than unmodified (measured: 4.0 %). "
            "75 of 76 gradients equal, gradients and rng differ: do not train with it.",
        ),
    ],
)
def test_no_more_than_is_known(check: Check | None, tells: str) -> None:
    assert said(check, lower_bound_us=0.0) == tells
    # That each op runs once needs no proof.
    assert said(check, lower_bound_us=min(GRAPH.time_us, 100.0)) == tells


def test_what_is_proved_is_told() -> None:
    assert ", proved within 1.2 % of the best plan. Not run." in said(None, **with_gap(0.012))
    assert ", proved to be the best plan. 76 of 76" in said(**with_gap(0.0))
    assert "unmodified (measured: 4.0 %), proved within 0.40 % of the" in said(**with_gap(0.004))


def test_pace_and_places() -> None:
    assert "MiB. As fast as unmodified (measured: " in said(time_us=100.0)
    assert "MiB, 2.0 % faster than unmodified" in said(None, time_us=98.0)
    assert said(None, {"cost_origin": "modelled"}).endswith(". Modelled, not run.")
    slow = said(checked(baseline_step_us=900.0, plan_step_us=1080.0))
    assert "(measured: 20.0 %, on a busy machine). 76" in slow
    within = said(checked(tolerance=1e-5))
    assert within.endswith("76 of 76 gradients within 1e-05 of unmodified.")
    unsteady = said(checked(gradients=70, unsteady=("gradient of w",)))
    assert "70 of 76 gradients equal, the others as near as unmodified repeats itself." in unsteady
    free = verdict(GRAPH, 0.0, msgspec.structs.replace(FOUND, lower_bound_us=0.0, time_us=0.0))
    assert "unmodified" not in free


def test_page_and_notebook_of_a_plan_begin_with_it(planned: Planned) -> None:
    graph, result = planned
    plan = remat.Plan.from_result(result, step=graph, check=CHECK)
    html = plan._repr_html_()
    line = page_facts(graph, result, check=CHECK).verdict
    assert html.startswith(f"<p><b>{line}</b></p>")
    assert "76 of 76 gradients equal." in line
    slower = percent_text(result.time_us / unmodified(graph).time_us - 1)
    assert f"{slower} slower than unmodified (measured: 4.0 %, on a busy machine), proved " in line
    assert html.count("<path") == 2
    assert f"budget {bytes_text(result.budget_bytes)}</li>" in html
    assert "prefers-color-scheme: dark" in html
    assert "<script" not in html
    assert not re.search(r"\n\s*\n", html)  # in Markdown an empty line would end it
    assert html.partition("\n")[2] in report(graph, result, check=CHECK)


def test_a_plan_without_its_step_shows_a_table(planned: Planned) -> None:
    lost = solve_within(planned.graph, 1000, "chen_sqrt")
    for plan in (remat.Plan.from_result(planned.result), remat.Plan.from_result(lost)):
        assert plan._repr_html_().startswith("<table>")


def test_a_budget_far_above_is_named_and_not_drawn(planned: Planned) -> None:
    graph, result = planned
    plan = remat.Plan.from_result(result, step=graph)
    assert '<line class="budget"' in plan._repr_html_()
    ample = msgspec.structs.replace(plan, budget_bytes=10 * unmodified(graph).peak_bytes)
    assert '<line class="budget"' not in ample._repr_html_()
    assert f"budget {bytes_text(ample.budget_bytes)}, above the picture" in ample._repr_html_()
