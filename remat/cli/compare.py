"""The verb `compare`: budgets against solvers and hand-written rules, with the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from remat.cli import options
from remat.cli.asked import asked, conclude
from remat.cli.session import INFEASIBLE, Session
from remat.cli.sweep import LimitOfAll, asked_budgets
from remat.graph_capture.derived.sharding import Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.job.opened import NO_BUDGET, open_plan
from remat.questions.compare import DEFAULT_BUDGETS, DEFAULT_SOLVERS
from remat.questions.compare import compare as compare_solvers
from remat.questions.comparison import comparison_screen
from remat.solver import TABLE, solver_class

BUDGETS = ",".join(DEFAULT_BUDGETS)
BudgetList = Annotated[
    str, typer.Option(help="50%,2GiB,... or how many from the least peak to the unmodified one")
]
Solvers = Annotated[
    list[str],
    typer.Option(
        "--solver",
        help=f"repeatable; {', '.join(DEFAULT_SOLVERS)} where none is named; of {', '.join(TABLE)}",
        show_default=False,
    ),
]


def compare(
    source: options.Anything,
    plan: options.PlanOption = None,
    budgets: BudgetList = BUDGETS,
    solver: Solvers = [],  # noqa: B006 typer copies it
    time_limit: LimitOfAll = 60.0,
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
    """Set solvers and rules side by side at several budgets, and a kept plan among them."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        wanted, names = asked_budgets(budgets), _known(solver or DEFAULT_SOLVERS)
        request = asked(
            NO_BUDGET, "auto", options.OrderName.fixed, time_limit, optimizer, accumulate, keep,
            recompute, device, profile, Sharding(shard.value, world_size, shard_blocks),
        )  # fmt: skip
        opened = open_plan(source, request, session.stages, plan)
        with session.stages.stage("compare", "solving at several budgets") as progress:
            found = compare_solvers(
                opened.graph, wanted, names, plan=opened.result, time_limit_s=time_limit,
                progress=lambda name, i, total: progress(i, total, text=f"solving with {name}"),
                keep=keep, recompute=recompute,
            )  # fmt: skip
        if as_json:
            session.emit(found.as_json())
        else:
            session.out.print(comparison_screen(found, session.out.width))
        fits = any(cell.fits for row in found.rows for cell in row.cells)
        conclude(session, INFEASIBLE, [] if fits else ["no schedule was found at any budget"])


def _known(names: Sequence[str]) -> Sequence[str]:
    """The names, refused before a model is loaded if one is unknown."""
    for name in names:
        solver_class(name)
    return names
