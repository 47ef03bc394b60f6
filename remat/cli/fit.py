"""The verb `fit`: the largest batch or sequence within a budget at a bearable overhead."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from remat.budgets import parse_budget
from remat.cli import options
from remat.cli.asked import asked, keep_result
from remat.cli.session import INFEASIBLE, Session
from remat.graph_capture.derived.sharding import Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.errors import BudgetError
from remat.job.fit import EACH_S, MOST, FitSearch
from remat.job.fitted import fit_screen
from remat.job.size_search import Range

Vary = Annotated[str, typer.Option(help="argument of the factory: batch, sequence, ...")]
FixedBudget = Annotated[str, typer.Option("--budget", help="8GiB, 512MiB, or auto (what is free)")]
MaxOverhead = Annotated[str, typer.Option(help="of the step that keeps everything, such as 10%")]
FirstSizes = Annotated[
    str, typer.Option("--sizes", help="the two to capture first, such as 8,16; default 2,4 steps")
]
Step = Annotated[int, typer.Option(min=1, help="sizes are multiples of it")]
Most = Annotated[int, typer.Option(min=1, help="no larger size is tried")]
EachLimit = Annotated[
    float, typer.Option("--time-limit", min=0.0, help="seconds to search for a plan at each size")
]
RunIt = Annotated[
    bool | None,
    typer.Option(
        "--check/--no-check",
        help="run a step of the answer; by default where the unmodified step fits here",
        show_default=False,
    ),
]


def fit(
    model: options.Model,
    vary: Vary = "batch",
    budget: FixedBudget = "auto",
    max_overhead: MaxOverhead = "10%",
    sizes: FirstSizes = "",
    step: Step = 1,
    most: Most = MOST,
    solver: options.Solver = "auto",
    order: options.Order = options.OrderName.fixed,
    time_limit: EachLimit = EACH_S,
    keep: options.Keep = [],  # noqa: B006 typer copies it
    recompute: options.Recompute = [],  # noqa: B006
    check: RunIt = None,
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
    """Find the largest size whose plan fits; it and the next are captured and solved."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        session.require_folder(output)
        request = asked(
            budget, solver, order, time_limit, optimizer, accumulate, keep, recompute, device,
            profile, Sharding(shard.value, world_size, shard_blocks),
        )  # fmt: skip
        parse_budget(budget)
        search = FitSearch(
            model, vary, Range(step, most, step), asked_overhead(max_overhead), request,
            session.stages, time_limit,
        )  # fmt: skip
        found = search.run(budget, asked_sizes(sizes, step), check)
        if search.best is not None:
            keep_result(session, output, *search.best[1:])
        if as_json:
            session.emit(found.as_json())
        else:
            session.out.print(fit_screen(found))
    if found.answer is None:
        raise SystemExit(INFEASIBLE)


def asked_overhead(text: str) -> float:
    """``10%`` or ``0.1`` as a fraction.

    Raises
    ------
    BudgetError : neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise BudgetError(f"overhead {text!r} cannot be read: write it like 10% or 0.1")
    return float(match[1]) / (100 if match[2] else 1)


def asked_sizes(text: str, step: int) -> tuple[int, int]:
    """The two sizes to capture first; 2 and 4 steps where none are named.

    Raises
    ------
    BudgetError : not two whole numbers.
    """
    if not text:
        return 2 * step, 4 * step
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BudgetError(f"sizes {text!r} cannot be read: write two, like 8,16")
    return int(parts[0]), int(parts[1])
