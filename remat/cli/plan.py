"""The verbs that plan: `capture`, `solve` and `rewrite`."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from rich.text import Text

from remat.cli import options
from remat.cli.outcome import (
    conclude_over,
    keep_layout,
    keep_result,
    priced,
    said_layout,
    said_price,
    show_layout,
    show_price,
)
from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import CAPTURED, COUNTED, verb
from remat.formats import bytes_text, time_text
from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.graph import TrainingGraph
from remat.infeasible import infeasible_text
from remat.job import json_report, pipeline
from remat.job.kept_plans import fitting_schedule, priced_in, read_kept
from remat.job.opened import captured, captured_model, load_shown
from remat.job.over_range import refuse_beside_dynamic
from remat.job.request import Request
from remat.job.screen import show_result
from remat.questions.tables import plain_table


@verb(CAPTURED)
def capture_verb(
    session: Session, model: options.Model, request: Request, output: options.Output = None
) -> None:
    """Trace one training step of MODEL, and measure what each op costs."""
    loaded = load_shown(model, session.stopwatch, request.device)
    graph = captured_model(loaded, request, session.stopwatch).graph
    session.save(output, graph.to_json(), "graph")
    if session.as_json:
        session.emit(msgspec.to_builtins(graph))
    else:
        _show_graph(session, graph)


@verb(budget="auto")
def solve_verb(
    session: Session,
    source: options.GraphOrModel,
    request: Request,
    price: options.PriceOfGib = False,
    output: options.Output = None,
    layout: options.LayoutFile = None,
    dynamic: options.Dynamic = [],  # noqa: B006 typer copies it
) -> None:
    """Find the fastest schedule that fits the budget."""
    if dynamic:
        refuse_beside_dynamic(request, **{"--price-of-gib": price, "--layout": layout is not None})
        conclude_over(session, source, request, dynamic, output)
        return
    source_of = captured(source, request, session.stopwatch)
    graph = source_of.graph
    result = pipeline.solve_request(graph, request, session.stopwatch)
    again = pipeline.runs_again(graph, result)
    keep_result(session, output, source_of, result)
    placed = keep_layout(session, layout, graph, result)
    worth = priced(session, graph, result, request) if price else None
    if session.as_json:
        session.emit(
            json_report.result_json(graph, result, again) | said_layout(placed) | said_price(worth)
        )
    elif result.schedule:
        show_result(session.out, graph, result, again)
        show_layout(session, placed)
        show_price(session, worth)
    session.conclude(INFEASIBLE, [] if result.schedule else [infeasible_text(result)])


@verb(COUNTED)
def rewrite_verb(
    session: Session,
    model: options.Model,
    plan: options.Plan,
    request: Request,
    device: options.Here = CPU,
    output: options.Output = None,
) -> None:
    """Print the forward and backward graphs of MODEL rewritten to a kept plan."""
    kept, request = read_kept(plan), replace(request, device=device)
    loaded = load_shown(model, session.stopwatch, device)
    schedule = fitting_schedule(kept, loaded, str(plan))
    with session.stopwatch.stage("rewrite", "rewriting"):
        from remat.rewriter.rewriting import rewrite

        traced = pipeline.trace_loaded(loaded, request)
        module = rewrite(loaded.model, schedule, trace=traced, priced=priced_in(kept))
    text = str(module)
    session.save(output, text.encode(), "code")
    if session.as_json:
        session.emit({"code": text})
    elif output is None:
        session.out.print(text, soft_wrap=True)


def _show_graph(session: Session, graph: TrainingGraph) -> None:
    backward = len(graph.ops) - graph.n_forward
    ops = f", {graph.n_forward} forward and {backward} backward ops"
    prices = f", {time_text(graph.time_us)}, {graph.prices} on {graph.device}\n"
    session.out.print(Text.assemble((graph.name, "bold"), ops, prices))
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
