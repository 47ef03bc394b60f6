"""The verbs that plan: `capture`, `solve` and `rewrite`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from remat.cli import options
from remat.cli.asked import asked, conclude, keep_result, priced, said_price, show_price
from remat.cli.session import INFEASIBLE, Session
from remat.formats import bytes_text, time_text
from remat.graph_capture.derived.sharding import Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.graph import TrainingGraph
from remat.infeasible import infeasible_text
from remat.job import json_report, pipeline
from remat.job.kept_plans import fitting_schedule, read_kept
from remat.job.opened import NO_BUDGET, captured, captured_model, load_shown
from remat.job.screen import show_result
from remat.questions.tables import plain_table
from remat.solver.result import Result

GraphOrModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|GRAPH|PLAN", help="a model, or a kept graph or plan to solve anew"
    ),
]


def capture(
    model: options.Model,
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    device: options.Device = CPU,
    shard: options.Shard = options.ShardName.none,
    world_size: options.WorldSize = 1,
    shard_blocks: options.ShardBlocks = "",
    profile: options.ProfileFile = None,
    output: options.Output = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Trace one training step of MODEL, and measure what each op costs."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        session.require_folder(output)
        request = asked(
            NO_BUDGET, "auto", options.OrderName.fixed, 0.0, optimizer, accumulate, device=device,
            profile=profile, sharding=Sharding(shard.value, world_size, shard_blocks),
        )  # fmt: skip
        loaded = load_shown(model, session.stages, device)
        graph = captured_model(loaded, request, session.stages).graph
        session.save(output, graph.to_json(), "graph")
        if as_json:
            session.emit(msgspec.to_builtins(graph))
        else:
            _show_graph(session, graph)


def solve(
    source: GraphOrModel,
    budget: options.Budget = "auto",
    solver: options.Solver = "auto",
    order: options.Order = options.OrderName.fixed,
    time_limit: options.TimeLimit = 60.0,
    keep: options.Keep = [],  # noqa: B006 typer copies it
    recompute: options.Recompute = [],  # noqa: B006
    price: options.PriceOfGib = False,
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    device: options.Device = CPU,
    shard: options.Shard = options.ShardName.none,
    world_size: options.WorldSize = 1,
    shard_blocks: options.ShardBlocks = "",
    profile: options.ProfileFile = None,
    output: options.Output = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Find the fastest schedule that fits the budget."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        session.require_folder(output)
        request = asked(
            budget, solver, order, time_limit, optimizer, accumulate, keep, recompute, device,
            profile, Sharding(shard.value, world_size, shard_blocks),
        )  # fmt: skip
        source_of = captured(source, request, session.stages)
        graph = source_of.graph
        result = pipeline.solve_request(graph, request, session.stages)
        keep_result(session, output, source_of, result)
        worth = priced(session, graph, result, request) if price else None
        if as_json:
            session.emit(_result_json(graph, result) | said_price(worth))
        elif result.schedule:
            show_result(session.out, graph, result)
            show_price(session, worth)
        conclude(session, INFEASIBLE, [] if result.schedule else [infeasible_text(result)])


def _result_json(graph: TrainingGraph, result: Result) -> dict[str, Any]:
    said = msgspec.to_builtins(msgspec.structs.replace(result, least_schedule=None))
    said |= {"bound": json_report.bound_json(graph, result)}
    said |= json_report.kept_json(graph, result)
    return said if result.schedule else said | json_report.infeasible_json(result)


def rewrite(
    model: options.Model,
    plan: options.Plan,
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    device: options.Here = CPU,
    output: options.Output = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Print the forward and backward graphs of MODEL rewritten to a kept plan."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        session.require_folder(output)
        kept = read_kept(plan)
        loaded = load_shown(model, session.stages, device)
        schedule = fitting_schedule(kept, loaded)
        with session.stages.stage("rewrite", "rewriting"):
            from remat.rewriter.rewriting import rewrite as rewritten

            traced = pipeline.trace_loaded(loaded, optimizer.value, accumulate, device)
            module = rewritten(loaded.model, schedule, trace=traced)
        text = str(module)
        session.save(output, text.encode(), "code")
        if as_json:
            session.emit({"code": text})
        elif output is None:
            session.out.print(text, markup=False, soft_wrap=True)


def _show_graph(session: Session, graph: TrainingGraph) -> None:
    backward = len(graph.ops) - graph.n_forward
    session.out.print(
        f"[bold]{graph.name}[/], {graph.n_forward} forward and {backward} backward ops, "
        f"{time_text(graph.time_us)}, {graph.prices} on {graph.device}\n"
    )
    table = plain_table("resident", "bytes")
    resident = msgspec.to_builtins(graph.resident)
    if not graph.resident.libraries_bytes:
        del resident["libraries_bytes"]
    for name, size_bytes in resident.items():
        table.add_row(name.removesuffix("_bytes"), bytes_text(size_bytes))
    session.out.print(table)
