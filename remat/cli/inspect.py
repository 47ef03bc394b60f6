"""The verb `inspect`: what a step holds, and what a plan keeps, makes again and frees."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from remat.cli import options
from remat.cli.asked import asked, opened_feasible
from remat.cli.session import Session
from remat.graph_capture.derived.sharding import Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.job.opened import NO_BUDGET
from remat.questions.inspect import inspect as inspect_graph
from remat.questions.inspection import Sums, inspection_screen


class ByName(StrEnum):
    """What values are summed by."""

    each = "value"
    module = "module"
    op = "op"
    line = "line"


SUMS: dict[ByName, Sums] = {
    ByName.each: "value", ByName.module: "module", ByName.op: "op", ByName.line: "line"
}  # fmt: skip
By = Annotated[ByName, typer.Option(help="one row a value, or sums by module, op or line")]
AtPeak = Annotated[bool, typer.Option("--at-peak", help="only what is live at the plan's peak")]
Only = Annotated[
    list[str],
    typer.Option("--only", metavar="GLOB", help="of modules, values, ops or lines; repeatable"),
]


def inspect(
    source: options.Anything,
    plan: options.PlanOption = None,
    budget: options.BudgetOrNone = NO_BUDGET,
    by: By = ByName.each,
    at_peak: AtPeak = False,
    only: Only = [],  # noqa: B006 typer copies it
    top: options.Top = 20,
    solver: options.Solver = "auto",
    order: options.Order = options.OrderName.fixed,
    time_limit: options.TimeLimit = 60.0,
    keep: options.Keep = [],  # noqa: B006
    recompute: options.Recompute = [],  # noqa: B006
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    device: options.Device = CPU,
    shard: options.Shard = options.ShardName.none,
    world_size: options.WorldSize = 1,
    shard_blocks: options.ShardBlocks = "",
    profile: options.ProfileFile = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show what is kept, recomputed and freed: sizes, places and prices, equal layers folded."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        request = asked(
            budget, solver, order, time_limit, optimizer, accumulate, keep, recompute, device,
            profile, Sharding(shard.value, world_size, shard_blocks),
        )  # fmt: skip
        opened = opened_feasible(session, source, request, plan)
        found = inspect_graph(opened.graph, opened.result, by=SUMS[by], only=only, at_peak=at_peak)
        if as_json:
            session.emit(found.as_json())
        else:
            session.out.print(inspection_screen(found, top, session.out.width))
