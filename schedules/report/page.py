"""The page of a plan: its data, as columns of plain numbers, its tables, and its HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

import msgspec
import numpy as np

from remat.formats import NO_BOUND, bytes_text, percent_text, proved_text, time_text
from remat.graph_capture.graph import Floats, Ints, TrainingGraph
from remat.schedules.palette import KINDS, ROLES, cycled
from remat.schedules.plots import band_colours
from remat.schedules.report.page_facts import Alternative, PageFacts
from remat.schedules.report.svg import arena_picture, copies_picture, step_picture
from remat.schedules.simulate import bound_of, gap_of
from remat.schedules.timeline import (
    OUTSIDE,
    BandsBy,
    Timeline,
    live_bands,
    ribbon,
)
from remat.schedules.value_report.rows import FoldedRow, fold_rows, value_rows


class _Summary(msgspec.Struct, frozen=True):
    peak_bytes: int
    time_us: float
    overhead: float
    budget_bytes: int
    lower_bound_us: float
    gap: float | None
    unmodified_peak_bytes: int
    unmodified_time_us: float
    resident_bytes: int
    workspace_at_peak_bytes: int
    runs: int
    runs_again: int
    again_us: float
    measured_peak_bytes: int | None = None
    measured_time_us: float | None = None
    stall_us: float = 0.0


_DIGITS = 6  # digits of times in ms after the point, which is to the nanosecond
_Columns = dict[str, Any]  # lists of plain numbers and texts by name, as JSON has them


def page_data(facts: PageFacts) -> _Columns:
    """What the page's script draws: a column a fact, of indices, numbers or texts."""
    line, eager = facts.line, facts.unmodified_line
    again = [int(is_again) for is_again in line.again]
    runs = {"op": line.ops.tolist(), "again": again, **_curve(line.edges, line.live_bytes)}
    colours, step = cycled([name for name, _ in facts.fronts]), facts.measured
    return {
        "model": facts.graph.name, "axis": line.axis_title, "summary": summary_of(facts),
        "peak_run": line.peak_run, "forward_runs": line.forward_runs, "ops": _ops(facts.graph),
        "values": _values(facts.graph), "runs": runs, "stays": _stays(line),
        "bands": {by: _bands(line, by) for by in ("kind", "module")},
        "unmodified": _curve(eager.edges, eager.live_bytes),
        "measured": step and len(step.moments) and _curve(
            line.stretched(step.moments), step.live_bytes
        ), "ribbon": _ribbon(line), "rules": facts.rules, "fronts": dict(facts.fronts),
        "colours": ROLES | {f"front {name}": colour for name, colour in colours.items()},
        "bound_name": facts.bound_name,
    }  # fmt: skip


def summary_of(facts: PageFacts) -> _Summary:
    line, eager = facts.line, facts.unmodified_line
    found, bound_us = line.simulation, facts.lower_bound_us
    measured, check = facts.measured, facts.check
    return _Summary(
        peak_bytes=found.peak_bytes, time_us=found.time_us, overhead=found.overhead,
        budget_bytes=facts.budget_bytes, lower_bound_us=bound_us,
        gap=gap_of(found.time_us, bound_us), stall_us=found.stall_us,
        unmodified_peak_bytes=eager.simulation.peak_bytes,
        unmodified_time_us=eager.simulation.time_us,
        resident_bytes=facts.graph.resident.total_bytes,
        workspace_at_peak_bytes=found.workspace_at_peak_bytes,
        runs=len(line), runs_again=int(line.again.sum()),
        again_us=found.time_us - found.stall_us - facts.graph.time_us,  # it computes or waits
        measured_peak_bytes=measured.peak_bytes if measured else check and check.plan_peak_bytes,
        measured_time_us=measured.time_us if measured else check and check.plan_step_us,
    )  # fmt: skip


def _texts(texts: Iterable[str]) -> _Columns:
    places: dict[str, int] = {}
    index = [places.setdefault(text, len(places)) for text in texts]
    return {"texts": list(places), "index": index}


def _ops(graph: TrainingGraph) -> _Columns:
    return {
        "name": [op.name for op in graph.ops],
        "target": _texts(op.target for op in graph.ops),
        "module": _texts(op.module for op in graph.ops),
        "source": _texts(op.source for op in graph.ops),
        "cost_us": [round(op.cost_us, 3) for op in graph.ops],
        "backward": [int(op.phase == "backward") for op in graph.ops],
    }


def _values(graph: TrainingGraph) -> _Columns:
    made = [value for value in graph.values if value.producer]
    return {
        "name": [value.name for value in made],
        "size_bytes": [value.size_bytes for value in made],
        "producer": [graph.op_index[value.producer] for value in made],
        "kind": _texts(value.kind for value in made),
        "shape": _texts(f"{value.dtype}{list(value.shape)}" for value in made),
    }


def _curve(edges: Floats, live_bytes: Ints) -> _Columns:
    rounded = [round(edge, _DIGITS) for edge in edges.tolist()]
    return {"edges": rounded, "live_bytes": live_bytes.tolist()}


def _stays(line: Timeline) -> _Columns:
    made = [value.name for value in line.graph.values if value.producer]
    place = {name: i for i, name in enumerate(made)}
    stays = [(place[stay.value], stay.begin, stay.end) for stay in line.residences]
    return dict(zip(("value", "begin", "end"), map(list, zip(*stays, strict=True)), strict=True))


def _bands(line: Timeline, by: BandsBy) -> list[_Columns]:
    bands = {name: curve for name, curve in live_bands(line, by).items() if curve.any()}
    colours = band_colours(list(bands), by)
    return [
        {
            "name": name, "colour": colours.get(name, KINDS["resident"]),
            # Mostly 0, which keeps the page at 1.9 MB for 6,000 ops.
            "changes": np.diff(curve, prepend=0).tolist(),
        }
        for name, curve in bands.items()
    ]  # fmt: skip


def _ribbon(line: Timeline) -> _Columns:
    picture = ribbon(line)
    spans = {
        kind: [n for span in getattr(picture, kind) for n in (span.row, span.begin, span.end)]
        for kind in ("holds", "holds_most", "forward", "backward", "recompute")
    }
    return {"titles": picture.titles, "spans": spans}


_MOST_ROWS = 30
_NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """The first column names the row, with a line below it of `notes`; the others are numbers."""

    name: str
    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def _schedules(facts: PageFacts, summary: _Summary) -> Table:
    base_us, check = summary.unmodified_time_us, facts.check
    measured_us = check.baseline_step_us if check else 0.0
    points = [*facts.rules, *(point for _, curve in facts.fronts for point in curve)]
    points.sort(key=lambda point: (-point.peak_bytes, point.time_us))
    rows = [
        ("this plan", "", summary.peak_bytes, summary.time_us, base_us),
        ("this plan, measured", "", summary.measured_peak_bytes, summary.measured_time_us,
         measured_us),
        ("unmodified", "", summary.unmodified_peak_bytes, base_us, 0.0),
        ("unmodified, measured", "", check and check.baseline_peak_bytes, measured_us, 0.0),
        *((one.name, _about(one, facts), one.peak_bytes, one.time_us, base_us)
          for one in points if one.name != "unmodified"),
    ]  # fmt: skip
    known = [row for row in rows if row[2]][:_MOST_ROWS]
    texts = (
        (
            name, bytes_text(peak_bytes or 0), time_text(time_us) if time_us else _NOTHING,
            percent_text(time_us / over_us - 1) if time_us and over_us else _NOTHING,
        )
        for name, _, peak_bytes, time_us, over_us in known
    )  # fmt: skip
    headers = ("schedule", "peak", "step", "overhead")
    notes = tuple(note for _, note, *_ in known)
    return Table("schedules", "Schedules of this step", headers, tuple(texts), notes)


def _about(point: Alternative, facts: PageFacts) -> str:
    said = [f"the best found within {bytes_text(point.budget_bytes)}"] if point.budget_bytes else []
    if point.budget_bytes:
        bound = proved_text(bound_of(point.lower_bound_us, facts.graph.base_us))
        said.append(bound if bound == NO_BOUND else f"{facts.bound_name} {bound}")
    if 0 < facts.budget_bytes < point.peak_bytes:
        said.append("above the budget")
    return ", ".join(said)


def _values_kept(facts: PageFacts, summary: _Summary) -> Table:
    """What is kept, recomputed, copied or live at the peak; equal layers share a row."""
    rows = value_rows(facts.graph, facts.schedule)
    chosen = [row for row in rows if row.at_peak or row.again or row.verdict in _VERDICTS]
    found = sorted(fold_rows(chosen), key=lambda row: -row.size_bytes)
    caption = (
        f"Values that are kept, recomputed or live at the peak: {len(chosen)}, beside "
        f"{bytes_text(summary.resident_bytes)} resident and, at the peak, "
        f"{bytes_text(summary.workspace_at_peak_bytes)} of workspace"
    )
    if rest := found[_MOST_ROWS:]:
        rest_bytes = sum(row.size_bytes for row in rest)
        caption += f"; not shown: {len(rest)} smaller rows, {bytes_text(rest_bytes)}"
    shown = found[:_MOST_ROWS]
    texts = (
        (
            row.module or OUTSIDE, str(row.count), bytes_text(row.first.size_bytes),
            bytes_text(row.size_bytes),
        )
        for row in shown
    )  # fmt: skip
    headers = ("module", "values", "size", "together")
    return Table("values", caption, headers, tuple(texts), tuple(map(_value_note, shown)))


_VERDICTS = {"keep": "kept", "offload": "copied to the host"}


def _value_note(row: FoldedRow) -> str:
    first = row.first
    said = (_VERDICTS.get(first.verdict, first.verdict_text), "live at the peak" * first.at_peak)
    shape = f"{first.kind} {first.dtype}{list(first.shape)}"
    return ", ".join(filter(None, (*said, shape, first.target, first.source)))


# The page hovers and zooms by a library within it: its content policy forbids every request.
_SCRIPTS = ("text", "run_chart", "memory", "ribbon", "front", "start")  # each uses those before it


def render(facts: PageFacts) -> str:
    # No line ends between a number and its unit.
    verdict = re.sub(r"[\d.]+ ([KMG]iB|%)", r"<span>\g<0></span>", escape(facts.verdict))
    summary = summary_of(facts)
    return rendered_html(
        "page.html", facts=facts, arena=arena_picture(facts), copies=copies_picture(facts),
        details=_details(facts, summary), schedules=_schedules(facts, summary),
        values=_values_kept(facts, summary), data=script_safe(page_data(facts)),
        style=file_text("page.css"), verdict=verdict, step=step_html(facts),
        library=file_text("vendor/echarts.common.min.js"),
        script="\n".join(file_text(f"scripts/{name}.js") for name in _SCRIPTS),
    )  # fmt: skip


def step_html(facts: PageFacts) -> str:
    """The picture of the step beside the unmodified one, which needs nothing around it."""
    return rendered_html("step.html", **step_picture(facts))


def rendered_html(file: str, /, package: str = "remat.schedules.report", **known: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    # Names come from the user's code and may contain HTML.
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(file_text(file, package)).render(**known)


def file_text(name: str, package: str = "remat.schedules.report") -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def script_safe(page: _Columns) -> str:
    # No text can then close the script element or begin a comment.
    return msgspec.json.encode(page).decode().replace("<", "\\u003c")


def _details(facts: PageFacts, summary: _Summary) -> list[tuple[str, str]]:
    graph = facts.graph
    waits = f", {time_text(summary.stall_us)} of waits for copies" if summary.stall_us else ""
    again = f"{summary.runs_again}, which take {time_text(summary.again_us)}{waits}"
    backward = len(graph.ops) - graph.n_forward
    ops = f"{graph.n_forward} forward and {backward} backward ops on {graph.device}"
    return [("step", ops), *facts.details, ("further runs", again)]
