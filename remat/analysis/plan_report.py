"""The report of a plan: one page of HTML, from a graph and a result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

import remat.solver as solvers
from remat.budgets import unmodified, unmodified_step
from remat.formats import bytes_text, fine_time_text, percent_text, plain_table
from remat.graph_capture.devices.known_devices import is_in_table, modelled_device
from remat.graph_capture.distributed.sharding import UNTIMED
from remat.graph_capture.errors import ScheduleError, TextError
from remat.graph_capture.files import decode_json, write_contents
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.layout import Layout
from remat.schedules.outcome import Check, Result, bound_text, equal_text, verdict
from remat.schedules.plan import PlanFile
from remat.schedules.report.page import render, step_html
from remat.schedules.report.page_facts import Alternative, MeasuredStep, PageFacts
from remat.schedules.simulate import simulate
from remat.schedules.value_report.peak_holders import PeakHolders
from remat.schedules.value_report.rows import DASH, FoldedRow
from remat.solved import budget_said
from remat.solver.budgets.front import Front
from remat.solver.recompute_summary import kinds_of, kinds_text
from remat.solver.result import at_least_budget

# Parts that several screens share: tables that fit 60 columns, and words for their cells.

_LONGEST = 36  # letters that a folded path may have before its ranges are cut short
_HOLDERS = 8  # values that are named as holders of the peak; the rest is one row


def holders_table(held: PeakHolders) -> Table:
    parts = [(f"resident: {name}", size) for name, size in held.resident.items()]
    parts += [(_holder_name(row), row.size_bytes) for row in held.values[:_HOLDERS]]
    rest = held.values[_HOLDERS:]
    if rest:
        count = sum(row.count for row in rest)  # the rest is one row, so that rows sum to the peak
        parts.append((f"{count} more values", sum(row.size_bytes for row in rest)))
    if held.workspace_bytes:
        parts.append((f"workspace of {short_target(held.target)}", held.workspace_bytes))
    if held.copies_bytes:
        parts.append(("second copies of its outputs", held.copies_bytes))
    table = plain_table("held at the peak by", "bytes", "share")
    for name, size in parts:
        table.add_row(Text(name), bytes_text(size), percent_text(size / held.peak_bytes))
    return table


def _holder_name(row: FoldedRow) -> str:
    count = f" x{row.count}" if row.count > 1 else ""
    place = f" of {short_path(row.module)}" if row.module else ""
    return f"{short_target(row.first.target)}{place}{count}"


def verdict_text(row: FoldedRow) -> str:
    return row.first.verdict_text + (" *" if row.first.at_peak else "")


def run_cost_text(row: FoldedRow) -> str:
    said = fine_time_text(row.cost_us / row.count)  # a folded row is several layers
    return said if row.first.cost_origin != "estimated" else f"{said} (guessed)"


def tensor_text(row: FoldedRow) -> str:
    return f"{row.first.dtype} {list(row.first.shape)}" if row.first.dtype else ""


def short_target(target: str) -> str:
    return target.removesuffix(".default")


def short_line(source: str) -> str:
    return source.rpartition("/")[2]


def short_path(path: str) -> str:
    """A folded path whose long ranges are cut: ``blocks.0,3,12,...,97.mlp``."""
    if len(path) <= _LONGEST:
        return path
    return ".".join(map(_short_ranges, path.split(".")))


def _short_ranges(part: str) -> str:
    runs = part.split(",")
    if len(runs) <= 4 or not runs[0].replace(DASH, "").isdecimal():
        return part
    return ",".join([*runs[:2], "...", runs[-1]])


def costs_text(graph: TrainingGraph) -> str:
    """Which costs are modelled, and how far off the model was seen to be."""
    said = list(graph.notes)
    if is_in_table(graph.device):
        title = modelled_device(graph.device).title
        said.insert(0, f"for {title}, at the maker's peak rates; nothing was run")
        if all(note == UNTIMED for note in graph.notes):
            said.append(
                "each is modelled, at shares of these rates that are fitted to published steps of "
                "other models"
            )
    return "; ".join(said)


_RULES = ("full", "every_n_layers", "selective", "chen_sqrt")  # quick to solve, shown by the plan
_RULE_S = 0.5  # seconds a rule: on thousands of ops, not all settings are tried


def report(
    graph: TrainingGraph, result: Result, path: str | Path | None = None, *,
    fronts: Mapping[str, Front] | Front | None = None, measured: MeasuredStep | None = None,
    layout: Layout | None = None, check: Check | None = None,
) -> str:  # fmt: skip
    """The page of a result, as HTML; written to `path` if one is given."""
    facts = page_facts(graph, result, fronts, measured, layout=layout, check=check)
    page = render(facts)
    if path is not None:
        write_contents(path, page.encode())
    return page


def plan_card(graph: TrainingGraph, result: Result, check: Check | None) -> str:
    """The first screen of the page, as HTML for a notebook."""
    facts = step_facts(graph, result, check)
    return f"<p><b>{escape(facts.verdict)}</b></p>\n{step_html(facts)}"


def fronts_in(data: bytes, name: str = "the file") -> dict[str, Front]:
    """What `remat sweep -o` kept, of one solver or of several."""
    with contextlib.suppress(TextError):
        fields = decode_json(data, dict[str, msgspec.Raw])
        if "points" not in fields:
            return {solver: Front.from_json(bytes(raw), name) for solver, raw in fields.items()}
    front = Front.from_json(data, name)
    return {front.solver: front}


def page_facts(
    graph: TrainingGraph, result: Result, fronts: Mapping[str, Front] | Front | None = None,
    measured: MeasuredStep | None = None, stated_by: str = "", layout: Layout | None = None,
    check: Check | None = None, kept: PlanFile | None = None,
) -> PageFacts:  # fmt: skip
    """What the page says.

    `stated_by` names the file that `fronts` are from, if any. `kept` is the file that `result` is
    of: what was proved and measured when it was made is quoted from it.
    """
    facts = step_facts(graph, result, check, kept)
    curves = {fronts.solver: fronts} if isinstance(fronts, Front) else dict(fronts or {})
    eager = _alternative("unmodified", unmodified(graph))
    return replace(
        facts, rules=(eager, *_rules_of(graph, result.of_tensors.budget_bytes)),
        fronts=tuple((name, _points_of(graph, front)) for name, front in curves.items()),
        measured=measured, stated_by=stated_by, layout=layout,
    )  # fmt: skip


def step_facts(
    graph: TrainingGraph, result: Result, check: Check | None = None, kept: PlanFile | None = None,
    *, is_range: bool = False,
) -> PageFacts:  # fmt: skip
    """What a page and a notebook begin with; of a range at its largest sizes, unlike the check."""
    if result.schedule is None:
        raise ScheduleError(
            f"there is no plan to report: none was found within {result.budget_bytes} bytes"
        )
    eager, told = unmodified_step(graph), result
    assert eager.result.schedule is not None
    kept = kept if kept and kept.graph == graph else None  # what a file states is of its own costs
    if kept is not None:
        check, is_range = kept.check, kept.over is not None
        if made := kept.prediction:
            proved = {"lower_bound_us": made.lower_bound_us, "status": made.status or told.status}
            told = msgspec.structs.replace(told, **proved)
    if is_range:
        told = msgspec.structs.replace(told, lower_bound_us=0.0)
        check = check and msgspec.structs.replace(check, baseline_step_us=0.0)
    said = verdict(graph, eager.result.time_us, told, check)
    return PageFacts(
        graph=graph_of_schedule(graph, result.schedule), schedule=result.schedule,
        unmodified_graph=eager.graph, unmodified_schedule=eager.result.schedule,
        budget_bytes=result.budget_bytes, lower_bound_us=result.lower_bound_us,
        verdict=f"{said} Times are of the largest sizes." if is_range else said,
        check=None if is_range else check, note=result.message,
        details=tuple(_known_by(graph, eager.result.peak_bytes, told, check, kept)),
    )  # fmt: skip


def _known_by(
    graph: TrainingGraph, unmodified_bytes: int, told: Result, check: Check | None,
    kept: PlanFile | None,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    if told.budget_bytes and unmodified_bytes:
        share = percent_text(told.budget_bytes / unmodified_bytes)
        said = budget_said(told.budget_bytes, graph.device, told.reserved_bytes)
        yield "budget", f"{said}, {share} of the unmodified peak"
    if check is not None:
        yield "equal", equal_text(check)
    elif kept and kept.unchecked:
        yield "not run", kept.unchecked
    if kept is not None:
        yield "machine", f"{kept.title}, torch {kept.versions.torch}"
    whose = ""
    if kept is not None and kept.prediction:
        order = {"fixed": "in captured order", "free": "in any order", None: ""}
        whose = f" {order[kept.prediction.order]}, as the plan's file states"
    yield "lower bound", f"{bound_text(graph, told)}{whose}"
    if told.message:
        yield "note", told.message
    yield "found by", told.solver or "hand"
    if told.schedule and (kinds := kinds_text(kinds_of(graph, told.schedule))):
        yield "recomputed", kinds
    yield "costs", costs_text(graph) or graph.cost_origin


def _rules_of(graph: TrainingGraph, budget_bytes: int) -> tuple[Alternative, ...]:
    found: list[Alternative] = []
    for name in _RULES:
        result = solvers.solve_within(graph, budget_bytes, name, time_limit_s=_RULE_S)
        if result.schedule is None:
            result = at_least_budget(graph, result)  # its least peak shows how far a rule is off
        if result is not None:
            found.append(_alternative(name, result))
    return tuple(found)


def _points_of(graph: TrainingGraph, front: Front) -> tuple[Alternative, ...]:
    if front.graph_hash != graph.hash:
        raise ScheduleError(
            f"sweep the model and batch of the plan: the front of {front.name}, by "
            f"{front.solver}, is of another graph than the plan of {graph.name}"
        )
    points: list[Alternative] = []
    for budget_bytes, result in front.points:
        if result.schedule is not None:
            found = simulate(graph, result.schedule)  # judged anew: anyone can edit a front's file
            figures = found.peak_bytes, found.time_us, found.overhead
            asked = budget_bytes, result.lower_bound_us
            points.append(Alternative(front.solver, *figures, *asked))
    return tuple(points)


def _alternative(name: str, result: Result) -> Alternative:
    return Alternative(name, result.peak_bytes, result.time_us, result.overhead)
