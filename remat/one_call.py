"""`remat.solve` and `remat.rematerialize`: a plan, or a module that follows it, in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from remat.budgets import parse_budget
from remat.checks import Batch, is_checked, require_equal, say_unchecked, unless_short
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import BudgetError, RewriteError, SolverError
from remat.graph_capture.graph import Optimizer, TrainingGraph
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.progress import solver_shown, stopwatch_of_call
from remat.ranks.collective_call import CollectiveCall
from remat.reference import Reference, gradients_there
from remat.schedules.family import Family
from remat.solved import Solved, facts_of, infeasible_text, planned_text
from remat.solver.reductions.pin_globs import Globs, as_globs
from remat.solver.result import Result
from remat.solver.table import check_number

if TYPE_CHECKING:
    from torch import fx, nn
    from torch.distributed import ProcessGroup

    from remat.graph_capture.costs.profile import Profile
    from remat.graph_capture.sizes.symbols import Dynamic
    from remat.graph_capture.tracing.recipe import Split
    from remat.graph_capture.tracing.trace import Trace
    from remat.rewriter.user_module.ranged import RangedModule


@overload
def solve(
    graph: RangedGraph,
    budget: str | SupportsIndex,
    solver: str = ...,
    time_limit_s: float = ...,
    *,
    keep: Globs = ...,
    recompute: Globs = ...,
    **options: Any,
) -> Family: ...
@overload
def solve(
    graph: TrainingGraph,
    budget: str | SupportsIndex,
    solver: str = ...,
    time_limit_s: float = ...,
    *,
    keep: Globs = ...,
    recompute: Globs = ...,
    **options: Any,
) -> Result: ...
def solve(
    graph: TrainingGraph | RangedGraph,
    budget: str | SupportsIndex,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    *,
    keep: Globs = (),
    recompute: Globs = (),
    **options: Any,
) -> Result | Family:
    """The fastest schedule of `graph` within `budget` that `solver` finds.

    Parameters
    ----------
    graph : with costs. Over a range of sizes, the outcome is a `Family`: a few schedules, of which
        one serves each size, all within the budget, which is proved.
    budget : bytes as an int, or ``"8GiB"``, ``"60%"`` of the unmodified peak, ``"auto"`` for what
        is free, ``"min"`` for the least peak known.
    solver : a name of `remat.solver`'s table.
    time_limit_s : wall clock, in seconds.
    keep : globs over module paths, such as ``"*.attn"``: what forward computes there is never
        recomputed. A glob covers all modules below those it matches.
    recompute : globs as well: what backward reads of these modules is computed again in backward.
    **options : of that solver; of `auto` for example ``order="free"``, which also tries
        other orders of first computations than the captured one.

    Returns
    -------
    Result : also where nothing fits; its status then is ``infeasible``.

    Raises
    ------
    TooLargeError : nothing fits at the largest sizes of a range; it names the largest that fit.
    BudgetError : the budget cannot be read. SolverError : an unknown solver or option, a glob
        that matches nothing, an op pinned both ways.
    """
    check_number("time_limit_s", time_limit_s)
    if isinstance(graph, RangedGraph):
        from remat.ranges.curve import solve_over

        pins = {"keep": as_globs(keep), "recompute": as_globs(recompute)}
        return solve_over(graph, budget, solver, time_limit_s, **pins, **options)
    if not isinstance(graph, TrainingGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SolverError(
            f"a plan is made for a graph, and this is {type(graph).__name__}: pass what "
            "remat.capture returned"
        )
    return parse_budget(budget).solve(
        graph, solver, time_limit_s=time_limit_s,
        keep=as_globs(keep), recompute=as_globs(recompute), **options,
    )  # fmt: skip


@overload
def rematerialize(
    model: nn.Module,
    args: tuple[Any, ...] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    budget: str | SupportsIndex,
    host: str | SupportsIndex | None = ...,
    nvme: str | None = ...,
    loss_fn: Callable[..., Any] | None = ...,
    target: Any = ...,
    optimizer: Optimizer = ...,
    accumulate: bool = ...,
    sharding: Sharding = ...,
    group: ProcessGroup | None = ...,
    profile: Profile | str | Path | None = ...,
    solver: str = ...,
    time_limit_s: float = ...,
    keep: Globs = ...,
    recompute: Globs = ...,
    check: bool | None = ...,
    audit: bool = ...,
    verbose: bool = ...,
    compile: bool = ...,
    float_inputs: Sequence[str] = ...,
    split: Split | None = ...,
    dynamic: Dynamic,
    **options: Any,
) -> RangedModule: ...
@overload
def rematerialize(
    model: nn.Module,
    args: tuple[Any, ...] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    budget: str | SupportsIndex,
    host: str | SupportsIndex | None = ...,
    nvme: str | None = ...,
    loss_fn: Callable[..., Any] | None = ...,
    target: Any = ...,
    optimizer: Optimizer = ...,
    accumulate: bool = ...,
    sharding: Sharding = ...,
    group: ProcessGroup | None = ...,
    profile: Profile | str | Path | None = ...,
    solver: str = ...,
    time_limit_s: float = ...,
    keep: Globs = ...,
    recompute: Globs = ...,
    check: bool | None = ...,
    audit: bool = ...,
    verbose: bool = ...,
    compile: bool = ...,
    float_inputs: Sequence[str] = ...,
    split: Split | None = ...,
    dynamic: None = ...,
    **options: Any,
) -> fx.GraphModule: ...
def rematerialize(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | SupportsIndex,
    host: str | SupportsIndex | None = None,
    nvme: str | None = None,
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
    audit: bool = True,
    verbose: bool = True,
    compile: bool = False,
    float_inputs: Sequence[str] = (),
    split: Split | None = None,
    dynamic: Dynamic | None = None,
    **options: Any,
) -> fx.GraphModule | RangedModule:
    """A module that trains as `model` does, to the same bits, within `budget`.

    It shares the parameters and buffers of `model`, under the same names, and trains on the
    device that they are on. Arguments are those of `remat.capture` and `remat.solve`. Of a model
    that follows a plan already, the original is planned.

    Parameters
    ----------
    host, nvme : memory below the device that values may move to, as of `remat.capture`: a plan then
        may copy a value there and back, where that is cheaper than to compute it again. Not with
        `compile` and `dynamic`.
    sharding : how you will wrap the result as a whole, by DDP or `fully_shard`; the budget then
        is that of one rank. To wrap blocks too, see `rematerialize_blocks`.
    group : ranks that are to follow the same plan: the first makes it. All of them must call. A
        model with collectives needs it.
    check : run a step of both modules and compare them, as `remat.check` does, before
        returning. None does so if the unmodified step fits into free memory, and warns if it
        does not. With a sharding the peak is not compared with the budget, as the wrapper's
        buffers are not there yet.
    audit : run the model's own forward, and the loss, beside the planned one at steps 2, 4, 8 and
        so on and at every thousandth, and raise `AuditError` where results differ: something that
        forward reads has changed, and no guard knows of it. What forward writes is put back.
        ``type(module).audit.why_not`` says why steps are not audited: the forward has no room in
        the plan's peak, or runs ops of yours, which may count. With False nothing is.
    verbose : show on a terminal what is done, and in one line what the plan is; where standard
        error is none, Python's log ``remat`` has both, at its level INFO. With False neither does.
    compile : let Inductor make the code, of a plan whose code keeps to the budget. Random numbers
        are eager's; all else is equal to a tolerance, and not to the bit. Ops have eager's costs;
        `torch.compile(model, backend="remat")` plans with those of Inductor's kernels.
    float_inputs : numbers of Python's that each step reads anew, so that one plan serves for all
        their values: a temperature, a drop rate. Their names are those that a refusal gives them,
        such as ``"temperature"`` or ``"layers.0.drop.p"``. Not with `compile`.
    split : ``exact`` lets a linear head with its cross-entropy run in chunks where that gives
        eager's bits, ``tolerance`` also where a sum has another order, and ``none`` never. Left
        out, it is ``exact`` for large heads, but ``none`` with `compile`, `sharding` or `group`.
    dynamic : dimensions of the batch that vary, as of `remat.capture`. One trace then serves all
        sizes of their ranges, and a few schedules, of which the size of a batch picks one. The
        budget holds at every size, which is proved; per cents are of the largest sizes. The batch
        at hand need not be the largest. Not with `sharding`, `group`, `compile`, `float_inputs` or
        `split`.

    Raises
    ------
    BudgetError : no schedule fits; the message names the least budget that is known to fit.
    TooLargeError : none fits at the largest sizes of a range; it names the largest that fit.
    RewriteError : the check found a difference, or a measured peak above the budget.
    AgreementError : ranks of the group have different models or batches, one of them has failed,
        or the model has collectives with ranks outside of the group.
    RematError : the model cannot be captured, or an option is unknown.
    """
    from remat.graph_capture.capture_api import add_costs, tiers_for
    from remat.graph_capture.costs.op_costs import with_measured_chunks
    from remat.graph_capture.costs.profile import as_profile
    from remat.graph_capture.distributed.collectives import collectives_in
    from remat.graph_capture.distributed.sharded_step import local_step
    from remat.graph_capture.tracing.mixed_precision import inputs_cast, parameters_cast
    from remat.graph_capture.tracing.recipe import check_arguments
    from remat.graph_capture.tracing.trace import trace
    from remat.levers.by_tolerance import naming_tolerance
    from remat.levers.chunks_at_need import may_wait, solved_at_need
    from remat.ranges.ranged_call import require_dynamic, require_options
    from remat.ranks.same_order import agree_on_audits, refuse_fake, require_group
    from remat.rewriter.rewriting import rewrite
    from remat.rewriter.user_module.module import original_of
    from remat.schedules.derived import before_sharding

    check_arguments(args, kwargs, loss_fn, target)
    model = original_of(model)
    require_options(
        {
            "loss_fn": loss_fn, "optimizer": optimizer, "accumulate": accumulate, "host": host,
            "sharding": sharding, "group": group, "profile": profile, "keep": keep,
            "time_limit_s": time_limit_s, "recompute": recompute, "check": check,
            "audit": audit, "verbose": verbose, "compile": compile, "float_inputs": float_inputs,
            "split": split,
        }
    )  # fmt: skip
    require_dynamic(model, dynamic, may_be_auto=False)
    asked: dict[str, Any] = {"keep": keep, "recompute": recompute, **options}
    batch = Batch(*inputs_cast(args, kwargs, sharding), loss_fn, target, optimizer, accumulate)
    if dynamic:
        from remat.graph_capture.sizes.ranged_signature import refuse_beside_ranges
        from remat.ranges.ranged_call import rematerialize_over

        refuse_beside_ranges(
            sharding=sharding.kind != "none", group=group is not None, compile=compile,
            float_inputs=bool(float_inputs), split=split not in (None, "none"),
            host=host is not None, nvme=nvme is not None,
        )  # fmt: skip
        return rematerialize_over(
            model, args, kwargs, dynamic, budget=budget, loss_fn=loss_fn, target=target,
            optimizer=optimizer, accumulate=accumulate, profile=profile, solver=solver,
            time_limit_s=time_limit_s, check=check, audit=audit, verbose=verbose, **asked,
        )  # fmt: skip
    refuse_fake(group)
    stages, name = stopwatch_of_call(verbose=verbose), type(model).__name__
    with CollectiveCall(group, "remat.rematerialize") as ranks, parameters_cast(model, sharding):
        known = as_profile(profile)
        tiers = tiers_for(model, None, host, nvme)
        if split is None and (compile or group is not None):
            split = "none"
        with stages.stage("capture", f"tracing {name}"):
            traced = trace(
                model, args, kwargs, loss_fn=loss_fn, target=target,
                optimizer=optimizer, accumulate=accumulate, sharding=sharding,
                float_inputs=float_inputs, split=split,
            )  # fmt: skip
        require_group(traced.joint.module, group)
        if compile:
            _refuse_compiled_dtensors(model)

        def costed(one: Trace, *, chunks: bool = True) -> TrainingGraph:
            most_bytes = parse_budget(budget).most_bytes(local_step(one.graph, sharding))
            with stages.stage("profile", "timing ops") as shown:
                graph = add_costs(
                    one, progress=shown, profile=known, tiers=tiers, most_bytes=most_bytes,
                    chunks=chunks,
                )  # fmt: skip
            return local_step(graph, sharding, is_rewritten=True)

        def solved(graph: TrainingGraph, budget: str | SupportsIndex, **known: Any) -> Result:
            with stages.stage("solve", f"solving for {budget}") as shown:
                told: Any = {"progress": solver_shown(shown, budget), **asked, **known}
                return solve(graph, budget, solver, time_limit_s, **told)

        def in_chunks(graph: TrainingGraph) -> TrainingGraph:
            with stages.stage("profile", "timing large layers in chunks") as shown:
                return with_measured_chunks(traced, graph, shown)

        def at(target: str | SupportsIndex) -> Solved:
            if not may_wait(traced, parse_budget(target)):
                graph = costed(traced)
                return Solved(graph, solved(graph, target))
            whole = costed(traced, chunks=False)
            solve_for = functools.partial(solved, budget=target)
            return solved_at_need(traced, whole, solve_for, in_chunks, stages)

        def make() -> Solved:
            found = at(budget)
            if found.result.schedule is None:
                again = functools.partial(solved, budget=found.result.budget_bytes)
                lost = naming_tolerance(found.result, traced, found.graph, costed, again)
                raise BudgetError(infeasible_text(lost))
            if not compile:  # its import takes Inductor's seconds
                return found
            from remat.compile.code_plans import with_fitting_code

            return with_fitting_code(traced, at, found, budget)

        ranks.require_same_step(traced.graph.hash)
        found = ranks.from_first(make, Solved)
        result = found.result
        if compile:
            from remat.compile.code_plans import compiled_module

            module, is_bound = compiled_module(model, traced, found, budget, audit=audit)
        else:
            assert result.schedule is not None
            schedule = before_sharding(result.schedule, traced.graph)
            module = rewrite(model, schedule, trace=traced, audit=audit, **facts_of(found))
            is_bound = sharding.kind == "none"
        agree_on_audits(ranks, [module])
        # The profiler does not see what gloo's threads free, so it cannot hold such a step to it.
        is_bound = is_bound and not collectives_in(traced.joint.module)
        beside_bytes = gradients_there(model) if accumulate else 0
        beside = Reference(found.graph, result.budget_bytes, beside_bytes)
        checked = None
        if ranks.all_agree("check", is_checked(traced.graph, check, beside)):
            most_bytes = result.budget_bytes if is_bound else None
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(
                    lambda: require_equal(model, module, batch, most_bytes, beside), say_unchecked
                )
        stages.say(planned_text(traced.recipe.title, result, checked, stages.elapsed_s))
    return module


def _refuse_compiled_dtensors(model: nn.Module) -> None:
    """Raise `RewriteError` for code by Inductor of a model whose parameters are DTensors."""
    from remat.graph_capture.distributed.dtensors import has_dtensors

    if has_dtensors(model):
        raise RewriteError(
            f"{type(model).__name__} has parameters that are DTensors, whose plans run eager's "
            "ops: leave out compile=True"
        )
