"""The verb `show`: the values of a step, why a plan is as it is, and files for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from remat.analysis.explanation import FURTHER_SOLVE_S, explain
from remat.analysis.inspect import InspectBy, Inspection, inspect
from remat.cli.session import Session, opened_feasible, save_layout_file
from remat.cli.verb import verb
from remat.formats import bytes_text, plain_table, time_text
from remat.graph_capture.errors import FileError, PlanError
from remat.graph_capture.graph import TrainingGraph
from remat.job import pipeline, plan_source
from remat.job.request import Request
from remat.job.screen import family_screen, ops_text, range_json
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


@verb()
def show_verb(
    session: Session, source: str, request: Request, plan: Path | None = None,
    by: InspectBy = "value", at_peak: bool = False, only: list[str] = [],  # noqa: B006 typer copies
    top: int = _TOP, is_explained: bool = False, why: list[str] = [],  # noqa: B006
    each_limit: float = FURTHER_SOLVE_S, place: bool = False, layout: Path | None = None,
    form: _Form | None = None, output: Path | None = None,
) -> None:  # fmt: skip
    """Show what a plan keeps, recomputes and frees, and why; or export it to other tools."""
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
        placed = None
        if place or layout:
            placed = save_layout_file(session, layout, opened.graph, opened.solved, is_asked=True)
        _show_values(session, opened, found, top, placed)
    else:
        _refuse_beside(f"--as {form}", table | further | {"--place": place, "--layout": layout})
        _show_as(session, form, source, request, plan, output)


def _refuse_beside(shown: str, options: Mapping[str, Any]) -> None:
    """Refuse the first option that is given and says nothing of what is shown."""
    if flag := next((flag for flag, given in options.items() if given), ""):
        raise PlanError(f"leave out {flag}: {shown} does not take it")


def _show_values(
    session: Session, opened: plan_source.PlanSource, found: Inspection, top: int,
    placed: Layout | None,
) -> None:  # fmt: skip
    said, screen = found.as_json(), [found.screen(session.out.width, top)]
    if over := opened.over:
        curve = overheads_over(over.graph, over.family)
        said["range"] = range_json(over.family, curve)
        screen += [Text(), family_screen(over.family, curve)]
    session.answer(said, *screen, layout=placed)


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
    try:
        if is_interrupted():
            raise KeyboardInterrupt
        with session.stopwatch.stage("explain", "explaining the plan") as progress:
            found = explain(
                opened.graph, opened.solved, why_of=why, each_s=each_limit,
                progress=lambda part: progress(text=_DOING[part]),
            )  # fmt: skip
    except KeyboardInterrupt:
        note_interrupt()  # the verb ends with 130
        # The plan that was to be explained, without more solves.
        _show_values(session, opened, inspect(opened.graph, opened.result), _TOP, None)
        return
    given = session, layout, opened.graph, opened.solved
    placed = save_layout_file(*given, is_asked=is_placed)
    session.answer(found.as_json(), found.screen(), layout=placed)


def _form_of(path: Path | None) -> _Form:
    if path is None or path.suffix not in _SUFFIXES:
        raise FileError(
            f"give --as {'|'.join(get_args(_Form))}, or a name that ends in .pickle (memory "
            f"snapshot), .trace.json (Chrome trace), .dot (Graphviz) or .py (code): {path} does "
            "not say what to write"
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
        session.answer(msgspec.to_builtins(graph), _sum_up(graph))
    elif form == "code":
        _refuse_beside("--as code", {"--budget": request.budget})
        _show_code(session, source, request, plan, output)
    elif output is None:
        raise FileError(f"name the file, -o step.{form}: --as {form} is not printed")
    else:
        opened = opened_feasible(session, source, request, plan)
        session.save(output, _exported(opened, form), form, end=b"")
        session.answer({"export": str(output), "as": form})


def _exported(opened: plan_source.PlanSource, form: _Form) -> bytes:
    if form == "dot":  # a graph without a plan can be drawn too; the others are of a schedule
        return to_dot(opened.graph, opened.schedule).encode()
    schedule = opened.solved.schedule
    assert schedule is not None
    write = snapshot_file if form == "snapshot" else trace_file
    return write(opened.graph, schedule)


def _sum_up(graph: TrainingGraph) -> RenderableType:
    costs = f", {time_text(graph.time_us)}, {graph.cost_origin} on {graph.device}\n"
    table = plain_table("resident", "bytes")
    resident = graph.resident.parts()
    if not graph.resident.libraries_bytes:
        del resident["libraries_bytes"]
    for name, size_bytes in resident.items():
        table.add_row(name.removesuffix("_bytes"), bytes_text(size_bytes))
    parts = [Text.assemble((graph.name, "bold"), ops_text(graph), costs), table]
    if links := graph.links:
        parts.append(Text(f"host {bytes_text(links.host_bytes)}: {links.source}"))
    return Group(*parts)


def _show_code(
    session: Session, model: str, request: Request, plan: Path | None, output: Path | None
) -> None:
    if plan is None:
        raise PlanError("name both, MODEL --plan plan.json: --as code rewrites a model to a plan")
    plan_source.require_model(model)
    kept = plan_source.read_kept(plan)
    loaded, request = plan_source.load_shown(model, session.stopwatch, request, kept)
    schedule, costed = plan_source.fitting_schedule(kept, loaded, str(plan))
    with session.stopwatch.stage("rewrite", "rewriting"):
        from remat.rewriter.rewriting import rewrite  # imports torch; kept plans need none

        traced = pipeline.trace_loaded(loaded, request)
        module = rewrite(loaded.model, schedule, trace=traced, costed=costed)
    text = str(module)
    session.save(output, text.encode(), "code")
    if session.as_json:
        session.emit({"code": text})
    elif output is None:
        session.out.print(text, soft_wrap=True)
