"""The page of a plan: its data, as columns of plain numbers, its tables, and its HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

import msgspec
import numpy as np

from remat.formats import NO_BOUND, bytes_text, percent_text, proved_text, time_text
from remat.graph_capture.graph import Floats, TrainingGraph
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
    place_of,
    ribbon,
    timeline,
)
from remat.schedules.value_report.rows import FoldedRow, ValueRow, fold_rows, value_rows


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


class _Texts(msgspec.Struct, frozen=True):
    texts: list[str]
    index: list[int]


class _Ops(msgspec.Struct, frozen=True):
    """A column a fact, in captured order; `backward` is 0 or 1."""

    name: list[str]
    target: _Texts
    module: _Texts
    source: _Texts
    cost_us: list[float]
    backward: list[int]


class _Values(msgspec.Struct, frozen=True):
    """Values that ops make; `producer` is an index into the ops."""

    name: list[str]
    size_bytes: list[int]
    producer: list[int]
    kind: _Texts
    shape: _Texts


class _Runs(msgspec.Struct, frozen=True):
    """Runs in order; `again` is 1 if the op ran before, `edges` has one entry more than runs."""

    op: list[int]
    edges: list[float]
    live_bytes: list[int]
    again: list[int]


class _Stays(msgspec.Struct, frozen=True):
    value: list[int]
    begin: list[int]
    end: list[int]


class _Band(msgspec.Struct, frozen=True):
    """Its bytes at a run are the sum of `changes` up to that run."""

    name: str
    colour: str
    changes: list[int]


class _Curve(msgspec.Struct, frozen=True):
    edges: list[float]
    live_bytes: list[int]


class _RibbonRows(msgspec.Struct, frozen=True):
    """Spans of rows, each as three numbers: row, begin, end."""

    titles: list[str]
    spans: dict[str, list[int]]


class _Page(msgspec.Struct, frozen=True):
    """What the page's script draws; `bound_name` says whose bounds the fronts have."""

    model: str
    axis: str
    summary: _Summary
    peak_run: int
    forward_runs: int
    ops: _Ops
    values: _Values
    runs: _Runs
    stays: _Stays
    bands: dict[str, list[_Band]]
    unmodified: _Curve
    measured: _Curve | None
    ribbon: _RibbonRows
    rules: list[Alternative]
    fronts: dict[str, list[Alternative]]
    colours: dict[str, str]
    bound_name: str = "bound"


_DIGITS = 6  # digits of times in ms after the point, which is to the nanosecond


def page_data(facts: PageFacts) -> _Page:
    line = timeline(facts.graph, facts.schedule)
    eager = timeline(facts.unmodified_graph, facts.unmodified_schedule)
    colours = cycled([name for name, _ in facts.fronts])
    return _Page(
        model=facts.graph.name, axis=line.axis_title, summary=_summary_of(facts, line, eager),
        peak_run=line.peak_run, forward_runs=line.forward_runs, ops=_ops(facts.graph),
        values=_values(facts.graph), runs=_runs(line), stays=_stays(line),
        bands={by: _bands(line, by) for by in ("kind", "module")},
        unmodified=_Curve(_rounded(eager.edges), eager.live_bytes.tolist()),
        measured=_measured(facts, line), ribbon=_ribbon(line), rules=list(facts.rules),
        fronts={name: list(points) for name, points in facts.fronts},
        colours=ROLES | {f"front {name}": colour for name, colour in colours.items()},
        bound_name=facts.bound_name,
    )  # fmt: skip


def _summary_of(facts: PageFacts, line: Timeline, eager: Timeline) -> _Summary:
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


def _texts(texts: Iterable[str]) -> _Texts:
    places: dict[str, int] = {}
    index = [places.setdefault(text, len(places)) for text in texts]
    return _Texts(list(places), index)


def _ops(graph: TrainingGraph) -> _Ops:
    return _Ops(
        name=[op.name for op in graph.ops],
        target=_texts(op.target for op in graph.ops),
        module=_texts(op.module for op in graph.ops),
        source=_texts(op.source for op in graph.ops),
        cost_us=[round(op.cost_us, 3) for op in graph.ops],
        backward=[int(op.phase == "backward") for op in graph.ops],
    )


def _values(graph: TrainingGraph) -> _Values:
    made = [value for value in graph.values if value.producer]
    return _Values(
        name=[value.name for value in made],
        size_bytes=[value.size_bytes for value in made],
        producer=[graph.op_index[value.producer] for value in made],
        kind=_texts(value.kind for value in made),
        shape=_texts(f"{value.dtype}{list(value.shape)}" for value in made),
    )


def _rounded(edges: Floats) -> list[float]:
    return [round(edge, _DIGITS) for edge in edges.tolist()]


def _runs(line: Timeline) -> _Runs:
    again = [int(is_again) for is_again in line.again]
    return _Runs(line.ops.tolist(), _rounded(line.edges), line.live_bytes.tolist(), again)


def _stays(line: Timeline) -> _Stays:
    made = [value.name for value in line.graph.values if value.producer]
    place = {name: i for i, name in enumerate(made)}
    stays = line.residences
    value = [place[stay.value] for stay in stays]
    return _Stays(value, [stay.begin for stay in stays], [stay.end for stay in stays])


def _bands(line: Timeline, by: BandsBy) -> list[_Band]:
    bands = {name: curve for name, curve in live_bands(line, by).items() if curve.any()}
    colours = band_colours(list(bands), by)
    return [
        # Mostly 0, which keeps the page at 1.9 MB for 6,000 ops.
        _Band(name, colours.get(name, KINDS["resident"]), np.diff(curve, prepend=0).tolist())
        for name, curve in bands.items()
    ]


def _measured(facts: PageFacts, line: Timeline) -> _Curve | None:
    step = facts.measured
    if step is None or not len(step.moments):
        return None
    return _Curve(_rounded(line.stretched(step.moments)), step.live_bytes.tolist())


def _ribbon(line: Timeline) -> _RibbonRows:
    picture = ribbon(line)
    spans: dict[str, list[int]] = {
        kind: [n for span in getattr(picture, kind) for n in (span.row, span.begin, span.end)]
        for kind in ("holds", "holds_most", "forward", "backward", "recompute")
    }
    return _RibbonRows(list(picture.titles), spans)


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


def _tables(facts: PageFacts, summary: _Summary) -> list[Table]:
    rows = value_rows(facts.graph, facts.schedule)
    made = (
        _at_peak(rows, summary),
        _with_verdict(rows, "keep", "kept", "Kept from forward for backward"),
        _with_verdict(rows, "offload", "host", "Copied to the host"),
        _computed_again(facts),
    )
    return [table for table in made if table.rows]


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


def _at_peak(rows: Sequence[ValueRow], summary: _Summary) -> Table:
    chosen = [row for row in rows if row.at_peak]
    caption = (
        f"Live at the peak: {len(chosen)} values beside {bytes_text(summary.resident_bytes)} "
        f"resident and {bytes_text(summary.workspace_at_peak_bytes)} of workspace"
    )
    return _of_values("peak", caption, chosen)


def _with_verdict(rows: Sequence[ValueRow], verdict: str, name: str, title: str) -> Table:
    chosen = [row for row in rows if row.verdict == verdict]
    size_bytes = sum(row.size_bytes for row in chosen)
    return _of_values(name, f"{title}: {len(chosen)} values, {bytes_text(size_bytes)}", chosen)


def _of_values(name: str, caption: str, rows: Sequence[ValueRow]) -> Table:
    found = sorted(fold_rows(rows), key=lambda row: -row.size_bytes)  # one row for equal layers
    rest = found[_MOST_ROWS:]
    if rest:
        rest_bytes = sum(row.size_bytes for row in rest)
        caption += f"; not shown: {len(rest)} smaller rows, {bytes_text(rest_bytes)}"
    headers = ("module", "values", "size", "together")
    shown = found[:_MOST_ROWS]
    notes = (
        f"{row.first.kind} {row.first.dtype}{list(row.first.shape)}, {row.first.target}, "
        f"{row.first.source}"
        for row in shown
    )
    return Table(name, caption, headers, tuple(map(_value_row, shown)), tuple(notes))


def _value_row(row: FoldedRow) -> tuple[str, ...]:
    sizes = bytes_text(row.first.size_bytes), bytes_text(row.size_bytes)
    return row.module or OUTSIDE, str(row.count), *sizes


def _computed_again(facts: PageFacts) -> Table:
    graph, runs = facts.graph, facts.schedule.computations()
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for op in graph.ops:
        more = runs[op.name] - 1
        if more > 0:
            key = place_of(op.module), op.target  # equal places in all layers share a row
            groups.setdefault(key, []).append((more, more * op.cost_us))
    ranked = sorted(groups.items(), key=lambda group: -sum(us for _, us in group[1]))
    rows = [
        (
            place, str(len(found)), str(sum(more for more, _ in found)),
            time_text(sum(us for _, us in found)),
        )
        for (place, _), found in ranked[:_MOST_ROWS]
    ]  # fmt: skip
    notes = tuple(target for (_, target), _ in ranked[:_MOST_ROWS])
    ops = sum(len(found) for found in groups.values())
    spent_us = sum(us for found in groups.values() for _, us in found)
    caption = f"Computed again: {ops} ops, {time_text(spent_us)} more than once each"
    headers = ("module", "ops", "further runs", "their time")
    return Table("again", caption, headers, tuple(rows), notes)


# The page hovers and zooms by a library within it: its content policy forbids every request.
_LIBRARY = "vendor/echarts.common.min.js"
_SCRIPTS = ("text", "run_chart", "memory", "ribbon", "front", "start")  # each uses those before it


def render(facts: PageFacts, page: _Page) -> str:
    from jinja2 import Environment, StrictUndefined

    # Names come from the user's code and may contain HTML.
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    # No line ends between a number and its unit.
    verdict = re.sub(r"[\d.]+ ([KMG]iB|%)", r"<span>\g<0></span>", escape(facts.verdict))
    return environment.from_string(_file("page.html")).render(
        facts=facts, page=page, arena=arena_picture(facts), copies=copies_picture(facts),
        details=_details(facts, page.summary), schedules=_schedules(facts, page.summary),
        tables=_tables(facts, page.summary), data=script_safe(page), style=_file("page.css"),
        verdict=verdict, step=step_html(facts), library=_file(_LIBRARY),
        script="\n".join(_file(f"scripts/{name}.js") for name in _SCRIPTS),
    )  # fmt: skip


def step_html(facts: PageFacts) -> str:
    """The picture of the step beside the unmodified one, which needs nothing around it."""
    from jinja2 import Environment, StrictUndefined

    plan = timeline(facts.graph, facts.schedule)
    eager = timeline(facts.unmodified_graph, facts.unmodified_schedule)
    picture = step_picture(facts.graph.name, plan, eager, facts.budget_bytes)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_file("step.html")).render(picture=picture)


def _file(name: str) -> str:
    return resources.files("remat.schedules.report").joinpath(name).read_text(encoding="utf-8")


def script_safe(page: _Page) -> str:
    # No text can then close the script element or begin a comment.
    return msgspec.json.encode(page).decode().replace("<", "\\u003c")


def _details(facts: PageFacts, summary: _Summary) -> list[tuple[str, str]]:
    graph = facts.graph
    waits = f", {time_text(summary.stall_us)} of waits for copies" if summary.stall_us else ""
    again = f"{time_text(summary.again_us)} for {summary.runs_again} further runs of ops{waits}"
    backward = len(graph.ops) - graph.n_forward
    ops = f"{graph.n_forward} forward and {backward} backward ops on {graph.device}"
    return [("step", ops), *facts.details, ("computed again", again)]
