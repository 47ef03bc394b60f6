"""The verb `show`: the values of a step, why a plan is as it is, and files for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import typer
from rich.text import Text

from remat.analysis.explanation import FURTHER_SOLVE_S, Explanation, explain, explanation_screen
from remat.analysis.inspect import InspectBy, Inspection, inspect, inspection_screen
from remat.cli.session import (
    Session,
    layout_entry,
    opened_feasible,
    place_shown,
    save_layout_file,
    show_layout,
)
from remat.cli.verb import LayoutFile, Output, PlaceOption, PlanOption, Source, Top, verb
from remat.formats import bytes_text, plain_table, time_text
from remat.graph_capture.errors import FileError, PlanError
from remat.graph_capture.graph import TrainingGraph
from remat.job import pipeline, plan_source
from remat.job.request import Request
from remat.job.screen import range_json, show_family
from remat.progress import in_one_line
from remat.ranges.curve import overheads_over
from remat.schedules.exports import snapshot_file, to_dot, trace_file
from remat.schedules.layout import Layout
from remat.solver.search import is_interrupted, note_interrupt

_Form = Literal["graph", "code", "snapshot", "trace", "dot"]  # for a file; some are printed
_SUFFIXES: dict[str, _Form] = {
    ".pickle": "snapshot", ".json": "trace", ".dot": "dot", ".py": "code"
}  # fmt: skip
_TOP = 20

_SumsBy = Annotated[InspectBy, typer.Option(help="one row a value, or sums by module, op or line")]
_AtPeak = Annotated[bool, typer.Option("--at-peak", help="only what is live at the plan's peak")]
_Only = Annotated[list[str], typer.Option(
    "--only", metavar="GLOB", help="of modules, values, ops or lines; repeatable",
)]  # fmt: skip
_Explain = Annotated[bool, typer.Option(
    "--explain",
    help="who holds the peak, what memory is worth, what was forced, and if a rule would do",
)]  # fmt: skip
_WhyOf = Annotated[list[str], typer.Option(
    "--why", metavar="GLOB", help="--explain, and why these values are kept or not; repeatable",
)]  # fmt: skip
_EachLimit = Annotated[
    float, typer.Option(min=0.0, help="with --explain: seconds for each further solve")
]
_As = Annotated[_Form | None, typer.Option(
    "--as",
    help="the captured graph; the graphs of MODEL rewritten to --plan; a file for PyTorch's "
    "memory viewer, Perfetto or Graphviz; by default the suffix of -o says it: .py, .pickle, "
    ".trace.json or .dot",
)]  # fmt: skip


@verb()
def show_verb(
    session: Session, source: Source, request: Request, plan: PlanOption = None,
    by: _SumsBy = "value", at_peak: _AtPeak = False, only: _Only = [],  # noqa: B006 typer copies it
    top: Top = _TOP, is_explained: _Explain = False, why: _WhyOf = [],  # noqa: B006
    each_limit: _EachLimit = FURTHER_SOLVE_S, place: PlaceOption = False,
    layout: LayoutFile = None, form: _As = None, output: Output = None,
) -> None:  # fmt: skip
    """Show what is kept, recomputed and freed, why, and in other tools' files."""
    if output is not None or form is not None:
        form = form or _form_of(output)  # before a capture: refuses unknown suffixes
    # typer gives every option, so one that differs from its default was asked for.
    table = {"--by": by != "value", "--at-peak": at_peak, "--only": only, "--top": top != _TOP}
    further = {"--each-limit": each_limit != FURTHER_SOLVE_S}
    if is_explained or why:
        _refuse_beside("--explain", table | {"-o" if output else "--as": form})
        _show_reasons(session, source, request, plan, why, each_limit, place, layout)
    elif form is None:
        _refuse_beside("the table of values", further)
        opened = opened_feasible(session, source, request, plan)
        found = inspect(opened.graph, opened.result, by=by, only=only, at_peak=at_peak)
        _show_values(session, opened, found, top, _placed(session, opened, place, layout))
    else:
        _refuse_beside(f"--as {form}", table | further | {"--place": place, "--layout": layout})
        _show_as(session, form, source, request, plan, output)


def _refuse_beside(shown: str, options: Mapping[str, Any]) -> None:
    """Refuse the first option that is given and says nothing of what is shown."""
    if flag := next((flag for flag, given in options.items() if given), ""):
        raise PlanError(f"{flag} is not taken by {shown}: leave it out, or show one at a time")


def _placed(
    session: Session, opened: plan_source.PlanSource, is_asked: bool, path: Path | None
) -> Layout | None:
    if path is not None:
        return save_layout_file(session, path, opened.graph, opened.solved)
    schedule = opened.solved.schedule if is_asked else None
    return place_shown(session, opened.graph, schedule) if schedule else None


def _show_values(
    session: Session,
    opened: plan_source.PlanSource,
    found: Inspection,
    top: int,
    placed: Layout | None,
) -> None:
    over = opened.over
    curve = overheads_over(over.graph, over.family) if over else None
    if session.as_json:
        ranges = {"range": range_json(over.family, curve)} if over and curve else {}
        session.emit(found.as_json() | layout_entry(placed) | ranges)
        return
    session.out.print(inspection_screen(found, top, session.out.width))
    show_layout(session, placed)
    if over and curve:
        session.out.print()
        show_family(session.out, over.family, curve)


_DOING = {
    "why": "solving with single ops pinned the other way",
    "price": "pricing memory",
    "least": "looking for the least budget",
    "rules": "trying simple rules",
    "levers": "solving with a lever off",
    "greedy": "comparing cut with greedy solvers",
}


def _show_reasons(
    session: Session, source: str, request: Request, plan: Path | None, why: list[str],
    each_limit: float, is_placed: bool, layout: Path | None,
) -> None:  # fmt: skip
    opened = opened_feasible(session, source, request, plan)
    if opened.kept is not None and opened.solved.message:
        # The bound that a kept plan states is not taken for proved. A page says it itself.
        session.err.print(in_one_line(opened.solved.message), soft_wrap=True)
    found = None if is_interrupted() else _reasons(session, opened, why, each_limit)
    if found is None:
        # The plan that was to be explained, without more solves.
        _show_values(session, opened, inspect(opened.graph, opened.result), _TOP, None)
        return
    placed = _placed(session, opened, is_placed, layout)
    if session.as_json:
        session.emit(found.as_json() | layout_entry(placed))
    else:
        session.out.print(explanation_screen(found))
        show_layout(session, placed)


def _reasons(
    session: Session, opened: plan_source.PlanSource, why: list[str], each_limit: float
) -> Explanation | None:
    try:
        with session.stopwatch.stage("explain", "explaining the plan") as progress:
            return explain(
                opened.graph, opened.solved, why_of=why, each_s=each_limit,
                progress=lambda part: progress(text=_DOING[part]),
            )  # fmt: skip
    except KeyboardInterrupt:
        note_interrupt()  # the plan is shown all the same; the verb ends with 130
        return None


def _form_of(path: Path | None) -> _Form:
    if path is None or path.suffix not in _SUFFIXES:
        raise FileError(
            f"{path}: a name that ends in .pickle (memory snapshot), .trace.json (Chrome trace), "
            ".dot (Graphviz) or .py (code) says what to write; or say it: "
            f"--as {'|'.join(get_args(_Form))}"
        )
    return _SUFFIXES[path.suffix]


def _show_as(
    session: Session, form: _Form, source: str, request: Request, plan: Path | None,
    output: Path | None,
) -> None:  # fmt: skip
    if form == "graph":
        _refuse_beside("--as graph", {"--plan": plan, "--budget": request.budget})
        graph = plan_source.captured(source, request, session.stopwatch).graph
        session.save(output, graph.to_json(), "graph")
        if session.as_json:
            session.emit(msgspec.to_builtins(graph))
        else:
            _sum_up(session, graph)
    elif form == "code":
        _refuse_beside("--as code", {"--budget": request.budget})
        _show_code(session, source, request, plan, output)
    elif output is None:
        raise FileError(f"--as {form} is a file: name it, -o step.{form}")
    else:
        opened = opened_feasible(session, source, request, plan)
        session.save(output, _exported(opened, form), form, end=b"")
        if session.as_json:
            session.emit({"export": str(output), "as": form})


def _exported(opened: plan_source.PlanSource, form: _Form) -> bytes:
    if form == "dot":  # a graph without a plan can be drawn too; the others are of a schedule
        return to_dot(opened.graph, opened.schedule).encode()
    schedule = opened.solved.schedule
    assert schedule is not None
    write = snapshot_file if form == "snapshot" else trace_file
    return write(opened.graph, schedule)


def _sum_up(session: Session, graph: TrainingGraph) -> None:
    backward = len(graph.ops) - graph.n_forward
    ops = f", {graph.n_forward} forward and {backward} backward ops"
    costs = f", {time_text(graph.time_us)}, {graph.cost_origin} on {graph.device}\n"
    session.out.print(Text.assemble((graph.name, "bold"), ops, costs))
    table = plain_table("resident", "bytes")
    resident = msgspec.to_builtins(graph.resident)
    if not graph.resident.libraries_bytes:
        del resident["libraries_bytes"]
    for name, size_bytes in resident.items():
        table.add_row(name.removesuffix("_bytes"), bytes_text(size_bytes))
    session.out.print(table)
    if graph.links is not None:
        room = bytes_text(graph.links.host_bytes)
        session.out.print(f"host {room}: {graph.links.source}", markup=False)


def _show_code(
    session: Session, model: str, request: Request, plan: Path | None, output: Path | None
) -> None:
    if plan is None:
        raise PlanError("--as code rewrites a model to a plan: name both, MODEL --plan plan.json")
    plan_source.require_model(model)
    kept = plan_source.read_kept(plan)
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)
    schedule = plan_source.fitting_schedule(kept, loaded, str(plan))
    with session.stopwatch.stage("rewrite", "rewriting"):
        from remat.rewriter.rewriting import rewrite  # imports torch; kept plans need none

        traced = pipeline.trace_loaded(loaded, request)
        costed = plan_source.costed_graph_in(kept)
        module = rewrite(loaded.model, schedule, trace=traced, costed=costed)
    text = str(module)
    session.save(output, text.encode(), "code")
    if session.as_json:
        session.emit({"code": text})
    elif output is None:
        session.out.print(text, soft_wrap=True)
