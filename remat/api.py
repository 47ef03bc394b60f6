"""The one-call functions: budgets as a person writes them, and the whole way to a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import remat.solver as solvers
from remat.budget import auto_bytes, parse_budget
from remat.formats import bytes_text
from remat.graph_capture.eager import as_eager
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.result import Result

if TYPE_CHECKING:
    from torch import fx, nn

Optimizer = Literal["none", "sgd", "momentum", "adamw"]

UNBOUNDED_BYTES = 2**62
"""A budget that binds nothing: for the schedules that a plan is compared with."""


def unmodified(graph: TrainingGraph) -> Result:
    """The step as eager runs it: every op once, nothing dropped before its last use."""
    return solvers.solve(as_eager(graph), UNBOUNDED_BYTES, solver="store_all")


def resolve_budget(
    graph: TrainingGraph,
    budget: str | SupportsIndex,
    *,
    solver: str = "auto",
    time_limit_s: float = 60.0,
) -> int:
    """Bytes that `budget` means for `graph`.

    Per cents are of the unmodified peak, ``auto`` is the free memory less a tenth, and
    ``min`` is the least peak that `solver` can find.
    """
    parsed = parse_budget(budget)
    if parsed.kind == "share":
        return int(parsed.share * unmodified(graph).peak_bytes)
    if parsed.kind == "auto":
        return auto_bytes()
    if parsed.kind == "min":
        return solvers.solve(
            graph, 0, solver=solver, time_limit_s=time_limit_s
        ).least_feasible_bytes
    return parsed.size_bytes


def solve(
    graph: TrainingGraph,
    budget: str | SupportsIndex,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    **options: Any,
) -> Result:
    """The fastest schedule of `graph` within `budget` that `solver` finds.

    Parameters
    ----------
    graph : priced.
    budget : bytes as an int, or ``"8GiB"``, ``"60%"``, ``"auto"``, ``"min"``.
    solver : a name of `remat.solver`'s table.
    time_limit_s : wall clock, in seconds.
    **options : of that solver.

    Returns
    -------
    Result : also where nothing fits; its status then is ``infeasible``.

    Raises
    ------
    BudgetError : the budget cannot be read. SolverError : an unknown solver or option.
    """
    budget_bytes = resolve_budget(graph, budget, solver=solver, time_limit_s=time_limit_s)
    return solvers.solve(graph, budget_bytes, solver=solver, time_limit_s=time_limit_s, **options)


def rematerialize(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | SupportsIndex,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    **options: Any,
) -> fx.GraphModule:
    """A module that trains as `model` does, to the same bits, within `budget`.

    It shares the parameters and buffers of `model`, under the same names. Arguments are
    those of `remat.capture` and `remat.solve`.

    Raises
    ------
    BudgetError : no schedule fits; the message names the least budget known to.
    RematError : the model cannot be captured, or an option is unknown.
    """
    from remat.graph_capture.pricing import price
    from remat.graph_capture.tracing import trace
    from remat.rewriter.rewriting import rewrite

    traced = trace(
        model, args, kwargs,
        loss_fn=loss_fn, target=target, optimizer=optimizer, accumulate=accumulate,
    )  # fmt: skip
    result = solve(price(traced), budget, solver, time_limit_s, **options)
    if result.schedule is None:
        raise BudgetError(infeasible_text(result))
    return rewrite(model, result.schedule, trace=traced)


def infeasible_text(result: Result) -> str:
    """One sentence each: what was asked, what is possible, what holds it, what to try."""
    asked, least = bytes_text(result.budget_bytes), result.least_feasible_bytes
    if not least:
        return f"no schedule within {asked} was found. {result.message or 'Raise the budget'}"
    rest = least - sum(item.size_bytes for item in result.held_at_peak)
    held = ", ".join(
        [f"resident and workspace {bytes_text(rest)}"]
        + [
            f"{item.module or item.name} {bytes_text(item.size_bytes)}"
            for item in result.held_at_peak[:3]
        ]
    )
    least_mib = -(-least // 2**20)
    return (
        f"budget {asked} is below {bytes_text(least)}, the least that a schedule is known to "
        f"reach; its peak is held by {held}. Try --budget {least_mib}MiB, "
        "a smaller batch, or --budget min"
    )
