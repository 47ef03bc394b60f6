"""The verb `explain`: why a plan is as it is, and what would be else."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.cli import options
from remat.cli.asked import asked, opened_feasible
from remat.cli.session import Session
from remat.graph_capture.derived.sharding import Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.job.opened import NO_BUDGET
from remat.questions.explain import EACH_S
from remat.questions.explain import explain as explain_plan
from remat.questions.explanation import explanation_screen

WhyOf = Annotated[
    list[str],
    typer.Option("--why", metavar="GLOB", help="why these values are kept or not; repeatable"),
]
EachLimit = Annotated[float, typer.Option(min=0.0, help="seconds for each further solve")]
DOING = {
    "why": "solving with single ops turned round",
    "price": "pricing memory",
    "least": "looking for the least budget",
    "rules": "trying simple rules",
    "greedy": "comparing cut with greedy solvers",
}


def explain(
    source: options.Anything,
    plan: options.PlanOption = None,
    budget: options.BudgetOrNone = NO_BUDGET,
    why: WhyOf = [],  # noqa: B006 typer copies it
    each_limit: EachLimit = EACH_S,
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
    """Say who holds the peak, what memory is worth, what was forced, and if a rule would do."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        request = asked(
            budget, solver, order, time_limit, optimizer, accumulate, keep, recompute, device,
            profile, Sharding(shard.value, world_size, shard_blocks),
        )  # fmt: skip
        opened = opened_feasible(session, source, request, plan)
        with session.stages.stage("explain", "explaining the plan") as progress:
            found = explain_plan(
                opened.graph,
                opened.solved,
                why_of=why,
                each_s=each_limit,
                progress=lambda part: progress(text=DOING[part]),
            )
        if as_json:
            session.emit(found.as_json())
        else:
            session.out.print(explanation_screen(found))
