"""One page that holds all it needs: style, script, plotting library, data. No network.

The page needs hovering and zooming, so it embeds a JavaScript library; `plots/` draws with
matplotlib on an ``ax`` that the user arranges and prints. Both take their colours from
`views/palette.py`. Tables are HTML and need no script. A content policy in the page forbids it
every request.
"""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import msgspec

from remat.formats import NO_BOUND, bytes_text, gap_text, percent_text, time_text
from remat.schedules.report.arena import arena_picture
from remat.schedules.report.columns import Page, Summary
from remat.schedules.report.copies import copies_picture
from remat.schedules.report.facts import Facts
from remat.schedules.report.tables import steps, tables
from remat.schedules.simulate import bound_of

LIBRARY = "vendor/echarts.common.min.js"
SCRIPTS = ("text", "run_chart", "memory", "ribbon", "front", "start")
"""Each script uses only those before it."""


class Figure(NamedTuple):
    """One large figure at the head of the page."""

    name: str
    text: str
    note: str


def render(facts: Facts, page: Page) -> str:
    """The page of a plan, as HTML; `page` is its `page_data`.

    Raises
    ------
    LayoutError : the layout to be drawn is of another step, or invalid.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["bytes"] = bytes_text
    return environment.from_string(_file("page.html")).render(
        facts=facts,
        page=page,
        arena=arena_picture(facts),
        copies=copies_picture(facts),
        figures=figures(facts, page.summary),
        steps=steps(page.summary),
        tables=tables(facts, page.summary),
        data=script_safe(page),
        style=_file("page.css"),
        script="\n".join(_file(f"scripts/{name}.js") for name in SCRIPTS),
        library=_file(LIBRARY),
    )


def _file(name: str) -> str:
    return resources.files("remat.schedules.report").joinpath(name).read_text(encoding="utf-8")


def script_safe(page: Page) -> str:
    """JSON in which nothing can end the script element or begin a comment."""
    return msgspec.json.encode(page).decode().replace("<", "\\u003c")


def figures(facts: Facts, summary: Summary) -> list[Figure]:
    """What a reader wants to know first."""
    base, peak = summary.unmodified_peak_bytes, summary.peak_bytes
    of_base = f"{percent_text(peak / base)} of the unmodified {bytes_text(base)}" if base else ""
    budget = bytes_text(summary.budget_bytes) if summary.budget_bytes else "none"
    return [
        Figure("budget", budget, f"{facts.status}, by {facts.solver}"),
        Figure("peak", bytes_text(peak), of_base),
        Figure("time of a step", time_text(summary.time_us), _more(summary)),
        Figure("overhead", percent_text(summary.overhead), _bound(facts, summary)),
    ]


def _more(summary: Summary) -> str:
    text = f"{time_text(summary.again_us)} for {summary.runs_again} further runs of ops"
    if not summary.stall_us:
        return text
    return f"{text}, {time_text(summary.stall_us)} of waits for copies"


def _bound(facts: Facts, summary: Summary) -> str:
    least = bound_of(summary.lower_bound_us, facts.graph.base_us)
    if least is None:
        return NO_BOUND
    return (
        f"no schedule at this budget has less than {percent_text(least)}; {gap_text(summary.gap)}"
    )
