"""The one-call functions: budgets as a person writes them, and the whole way to a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import msgspec

import remat.solver as solvers
from remat.agreement import agreed
from remat.budgets import RESERVE, auto_bytes, parse_budget
from remat.checks import advice_of
from remat.formats import bytes_text
from remat.graph_capture.derived.eager import as_eager
from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.devices.device_table import is_in_table, modelled_device
from remat.graph_capture.errors import BudgetError, RewriteError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plan import Prediction
from remat.schedules.schedule import Schedule
from remat.solver.budgets.worth import least_peak
from remat.solver.pins.globs import Globs, as_globs
from remat.solver.result import Result

if TYPE_CHECKING:
    from torch import fx, nn
    from torch.distributed import ProcessGroup

    from remat.graph_capture.prices.profile import Profile

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
    keep: Globs = (),
    recompute: Globs = (),
    **options: Any,
) -> int:
    """Bytes that `budget` means for `graph`.

    Per cents are of the unmodified peak, and ``min`` is the least peak that `solver` knows
    for these pins and options. ``auto`` is what the model and the batch take plus the memory
    that is free on its device less a tenth; for a modelled device, its memory less a tenth.
    """
    parsed = parse_budget(budget)
    if parsed.kind == "share":
        return int(parsed.share * unmodified(graph).peak_bytes)
    if parsed.kind == "auto" and is_in_table(graph.device):
        return int(modelled_device(graph.device).memory_bytes * (1 - RESERVE))
    if parsed.kind == "auto":
        resident = graph.resident
        allocated_bytes = resident.parameters_bytes + resident.buffers_bytes + resident.batch_bytes
        return auto_bytes(graph.device) + allocated_bytes
    if parsed.kind == "min":
        lost = solvers.solve(
            graph, 0, solver,
            time_limit_s=time_limit_s, keep=keep, recompute=recompute, **options,
        )  # fmt: skip
        return lost.least_feasible_bytes
    return parsed.size_bytes


def solve(
    graph: TrainingGraph,
    budget: str | SupportsIndex,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    *,
    keep: Globs = (),
    recompute: Globs = (),
    **options: Any,
) -> Result:
    """The fastest schedule of `graph` within `budget` that `solver` finds.

    Parameters
    ----------
    graph : priced.
    budget : bytes as an int, or ``"8GiB"``, ``"60%"``, ``"auto"``, ``"min"``.
    solver : a name of `remat.solver`'s table.
    time_limit_s : wall clock, in seconds.
    keep : globs over module paths, such as ``"*.attn"``: what forward computes there is never
        recomputed. A glob covers all modules below those it matches.
    recompute : globs as well: what backward reads from there is computed again in backward.
    **options : of that solver; of `auto` for example ``order="free"``, which also tries
        other orders of first computations than the captured one.

    Returns
    -------
    Result : also where nothing fits; its status then is ``infeasible``.

    Raises
    ------
    BudgetError : the budget cannot be read. SolverError : an unknown solver or option, a glob
        that matches nothing, an op pinned both ways.
    """
    asked: dict[str, Any] = {
        "keep": as_globs(keep), "recompute": as_globs(recompute), **options
    }  # fmt: skip
    if parse_budget(budget).kind == "min":
        return least_peak(graph, time_limit_s, solver=solver, **asked)
    budget_bytes = resolve_budget(graph, budget)
    return solvers.solve(graph, budget_bytes, solver, time_limit_s=time_limit_s, **asked)


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
    sharding: Sharding = NO_SHARDING,
    group: ProcessGroup | None = None,
    profile: Profile | str | Path | None = None,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    keep: Globs = (),
    recompute: Globs = (),
    check: bool | None = None,
    compile: bool = False,
    **options: Any,
) -> fx.GraphModule:
    """A module that trains as `model` does, to the same bits, within `budget`.

    It shares the parameters and buffers of `model`, under the same names, and trains on the
    device that they are on. Arguments are those of `remat.capture` and `remat.solve`.

    Parameters
    ----------
    sharding : how the result is to be wrapped as a whole afterwards, by DDP or `fully_shard`; the
        budget then is that of one rank. To wrap blocks too, see `rematerialize_blocks`.
    group : ranks that are to follow the same plan: the first makes it. All of them must call.
    check : run a step of both modules and compare them, as `remat.check` does, before
        returning. Left at None, that is done where the unmodified step fits into the
        memory that is free, and left out with a warning where it does not. With a sharding,
        whose buffers are not there yet, peaks are not compared with the budget.
    compile : Inductor makes the code, of a plan whose code is seen to keep to the budget. Random
        numbers are eager's; the rest is not to the bit, and is checked to a tolerance. Prices are
        those of eager's ops: `torch.compile(model, backend="remat")` plans with Inductor's.

    Raises
    ------
    BudgetError : no schedule fits; the message names the least budget known to.
    RewriteError : the check found a difference, or a measured peak above the budget.
    AgreementError : ranks of the group have different models or batches.
    RematError : the model cannot be captured, or an option is unknown.
    """
    from remat.graph_capture.derived.one_rank import on_one_rank
    from remat.graph_capture.prices.pricing import price
    from remat.graph_capture.prices.profile import as_profile
    from remat.graph_capture.tracing.trace import trace
    from remat.rewriter.rewriting import rewrite
    from remat.schedules.before_sharding import before_sharding

    known = as_profile(profile)
    if sharding.blocks:
        raise RewriteError(
            f"modules inside a rewritten one cannot be sharded by themselves ({sharding.blocks}): "
            "use remat.rematerialize_blocks, and shard the blocks that it rewrote"
        )
    if compile and (sharding.kind != "none" or group is not None):
        raise RewriteError(
            "compile=True takes neither a sharding nor a group: Inductor's code is looked at for "
            "one rank, without what a wrapper holds. Leave out compile=True, or train on one rank"
        )
    traced = trace(
        model, args, kwargs, loss_fn=loss_fn, target=target,
        optimizer=optimizer, accumulate=accumulate, sharding=sharding,
    )  # fmt: skip

    asked: dict[str, Any] = {"keep": keep, "recompute": recompute, **options}

    def at(target: str | SupportsIndex) -> Solved:
        graph = on_one_rank(price(traced, profile=known), sharding)
        return Solved(graph, solve(graph, target, solver, time_limit_s, **asked))

    def make() -> Solved:
        found = at(budget)
        if found.result.schedule is None:
            raise BudgetError(infeasible_text(found.result))
        return found

    found = agreed(make, Solved, traced.graph.hash, group)
    result = found.result
    if compile:
        from remat.compile.code_plans import compiled_within

        module, is_bound = compiled_within(model, traced, at, found, budget)
    else:
        assert result.schedule is not None
        schedule = before_sharding(result.schedule, traced.graph)
        module = rewrite(model, schedule, trace=traced, **facts_of(found))
        is_bound = sharding.kind == "none"
    if is_checked(traced.graph, check):
        batch = Batch(args, kwargs, loss_fn, target, optimizer, accumulate)
        require_equal(model, module, batch, result.budget_bytes if is_bound else None)
    return module


class Solved(msgspec.Struct, frozen=True):
    """A graph and what was solved on it."""

    graph: TrainingGraph
    result: Result


def facts_of(found: Solved) -> dict[str, Any]:
    """What `rewrite` keeps of a solve in the module's plan."""
    assert found.result.schedule is not None
    return {
        "prediction": predicted(found.result, found.graph.prices),
        "priced": graph_behind(found.graph, found.result.schedule),
    }


def graph_behind(graph: TrainingGraph, schedule: Schedule) -> TrainingGraph | None:
    """`graph`, if the schedule was made for it; None where that is one before it was sharded."""
    return graph if graph.hash == schedule.graph_hash else None


def predicted(result: Result, prices: str) -> Prediction:
    """What a plan keeps of a result, whose figures come from `simulate` and such prices."""
    return Prediction(
        peak_bytes=result.peak_bytes,
        time_us=result.time_us,
        overhead=result.overhead,
        lower_bound_us=result.lower_bound_us,
        gap=result.gap,
        prices=prices,
    )


@dataclass(frozen=True)
class Batch:
    """What a step is captured on."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    loss_fn: Callable[..., Any] | None
    target: Any
    optimizer: Optimizer
    accumulate: bool


def is_checked(graph: TrainingGraph, check: bool | None) -> bool:
    """Whether to run the unmodified step too: as asked, else if it fits into free memory."""
    if check is not None:
        return check
    reason = why_unchecked(graph)
    if reason:
        warnings.warn(f"{reason}; pass check=True to run it anyway", stacklevel=3)
    return not reason


def why_unchecked(graph: TrainingGraph) -> str:
    """Why the unmodified step had better not run here; empty where it fits into free memory."""
    need_bytes = unmodified(graph).peak_bytes - graph.resident.total_bytes
    if need_bytes <= auto_bytes(graph.device):
        return ""
    return (
        f"the plan is not checked against the unmodified step, which needs "
        f"{bytes_text(need_bytes)} more than is allocated now"
    )


def require_equal(
    model: nn.Module, module: nn.Module, batch: Batch, budget_bytes: int | None
) -> None:
    """Run a step of both, and compare; also the peak, unless the budget is None.

    Raises
    ------
    RewriteError : they differ, or the peak exceeds the budget.
    """
    from remat.rewriter.checking.check import check

    found = check(
        model, module, batch.args, batch.kwargs, loss_fn=batch.loss_fn, target=batch.target,
        optimizer=batch.optimizer, accumulate=batch.accumulate, steps=1,
    )  # fmt: skip
    if found.differences:
        raise RewriteError(
            f"the rewritten {type(model).__name__} differs from eager in "
            f"{', '.join(found.differences[:5])}: do not train with it. Please report this model"
        )
    if budget_bytes is not None and found.exceeds(budget_bytes):
        raise RewriteError(
            f"the measured peak, {bytes_text(found.plan_peak_bytes)}, exceeds the budget of "
            f"{bytes_text(budget_bytes)}. Give a smaller budget, and please report this model"
        )
    for advice in advice_of(found, budget_bytes):
        warnings.warn(advice, stacklevel=3)


def infeasible_text(result: Result) -> str:
    """One sentence each: what was asked, what is possible, what holds it, what to try.

    And, where the budget is below it, the floor; and what is proved to be needed.
    """
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
        f"reach; its peak is held by {held}. {_floor_text(result)}Try --budget {least_mib}MiB, "
        "a smaller batch, or --budget min"
    )


def _floor_text(result: Result) -> str:
    """Sentences on the floor and on what is proved, each ending in a space."""
    text = ""
    if result.floor:
        place = result.floor.module or result.floor.name
        text = (
            f"The floor, below which outputs of the step must be recomputed, is "
            f"{bytes_text(result.floor.size_bytes)}, at {place}. "
        )
    if result.least_bound_bytes:
        text += f"No schedule needs less than {bytes_text(result.least_bound_bytes)}. "
    return text
