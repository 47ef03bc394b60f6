"""The public way from a schedule to a module that trains."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, overload

from torch import nn

from remat.graph_capture.chunking.regions import AND, COUNTS, find_regions
from remat.graph_capture.chunking.same_bits import is_known_to_give_them, kept_bits
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.distributed.rank_refusals import refuse_range_over_ranks, refuse_wrappers
from remat.graph_capture.errors import RewriteError, ScheduleError, option
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.chunks_over_sizes import exact_counts
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.tracing import trace as tracing
from remat.graph_capture.tracing.fake_tensors import has_storage
from remat.graph_capture.tracing.recipe import Recipe, recipe_for, require_switches
from remat.graph_capture.tracing.step_module import LossFunction
from remat.graph_capture.tracing.trace import trace_recipe
from remat.graph_capture.tracing.traced_step import Trace, with_edits
from remat.rewriter.arena.captured import capture_steps
from remat.rewriter.checking.audit import Audits, of_steps
from remat.rewriter.compiled import compile_step, edits_of, links_of
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.user_module.module import RematModule, make_module
from remat.rewriter.user_module.ranged import (
    MakeCode,
    RangedModule,
    as_planned_over,
    make_ranged,
    tier_at_most,
)
from remat.schedules.family import Family
from remat.schedules.plan import Prediction
from remat.schedules.schedule import ChunkedRegion, Schedule
from remat.schedules.simulate import require_valid


def trace_of_schedule(
    model: nn.Module, recipe: Recipe, schedule: Schedule, captured: Trace | None = None
) -> Trace:
    """A trace of the step that `schedule` is of; `captured` is used up if it can serve."""
    for one in schedule.chunks:  # not covered by the hash, and a file may have been edited
        if one.chunks not in COUNTS:
            raise ScheduleError(
                f"solve again: this plan runs {one.region} in {one.chunks} chunks, and regions "
                f"run in {', '.join(map(str, COUNTS))}"
            )
    facts = schedule.graph_hash, recipe.device
    # The plan may come from elsewhere: exact chunks are compared with eager here, once a process.
    exact = [one for one in schedule.chunks if one.exact]
    unknown = [one for one in exact if not is_known_to_give_them(*facts, one.region, one.chunks)]
    # Compiling uses up a trace's record, which `with_edits` takes over.
    is_usable = captured is not None and not captured.compiled and not captured.floats
    if unknown:
        whole = dataclasses.replace(recipe, edits=())
        known = captured if captured and is_usable else trace_recipe(model, whole)
        _require_eagers_bits(known, unknown)
    edits = tuple(edits_of(schedule))
    if captured and is_usable and edits:
        return with_edits(captured, edits)
    return trace_recipe(model, dataclasses.replace(recipe, edits=edits))


def _require_eagers_bits(captured: Trace, wanted: Iterable[ChunkedRegion]) -> None:
    has_them = kept_bits(meter_of(captured.recipe.device))
    for one in wanted:
        for found in find_regions(captured, is_exact=True, names=one.region.split(AND)):
            found.set_chunks(one.chunks)
            if not has_them(found):
                raise _other_bits(found.name, found.chunks)


def _other_bits(name: str, chunks: int) -> RewriteError:
    return RewriteError(
        f"plan here, or with {option('split', 'tolerance')} or {option('split', 'none')}: {name} "
        f"in {chunks} chunks gives other bits than eager here, as kernels sum some rows in another "
        "order"
    )


def require_bits_over(traced: Trace, family: Family) -> None:
    """Exact chunks of a family, which may come from elsewhere, give eager's bits here too."""
    chosen = dict.fromkeys(one for member in family.members for one in member.schedule.chunks)
    for one in (one for one in chosen if one.exact):
        if not exact_counts(traced, one.region, [one.chunks]):
            raise _other_bits(one.region, one.chunks)


@overload
def rewrite(
    model: nn.Module, schedule: Family,
    *, trace: Trace | None = ..., over: RangedGraph | None = ..., audit: bool = ...,
) -> RangedModule: ...  # fmt: skip
@overload
def rewrite(
    model: nn.Module, schedule: Schedule,
    args: tuple[Any, ...] | None = ..., kwargs: Mapping[str, Any] | None = ...,
    *, loss_fn: LossFunction | None = ..., target: Any = ..., trace: Trace | None = ...,
    prediction: Prediction | None = ..., costed: TrainingGraph | None = ..., compile: bool = ...,
    updates: Updates | None = ..., over: RangedGraph | None = ..., audit: bool = ...,
    cuda_graphs: bool = ...,
) -> RematModule: ...  # fmt: skip
def rewrite(
    model: nn.Module,
    schedule: Schedule | Family,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    trace: Trace | None = None,
    prediction: Prediction | None = None,
    costed: TrainingGraph | None = None,
    compile: bool = False,
    updates: Updates | None = None,
    over: RangedGraph | None = None,
    audit: bool = True,
    cuda_graphs: bool = False,
) -> RematModule | RangedModule:
    """Compile `schedule` into a module that trains as `model` does, within its budget.

    The result is a `torch.fx.GraphModule` and an instance of the model's class, with the same
    parameters, buffers and names. `model` stays usable. With collectives, all ranks must call, and
    their plans must run these alike.

    A family over a range of sizes makes a `RangedModule`; of the other arguments only `trace` and
    `over` are heeded. In the process that captured `model` no batch is needed, else it is traced on
    `args`, `kwargs`, `loss_fn` and `target`.

    `prediction` and `costed`, whose links say where values may be copied to, are kept in the
    module's plan. `compile`: Inductor makes the code; random numbers stay eager's to the bit,
    results do not, and the code's peak can differ from the schedule's. `cuda_graphs`: as of
    `remat.rematerialize`. `over`: the graph over a
    range of sizes that `schedule` was made for at one; `model` must have been captured here.

    Warns where the peak of the schedule, or of its code, is above its budget. `ScheduleError`: of
    another model or batch, or `simulate` refuses it. `RewriteError`: the batch is not known here,
    or copies to the host meet `compile`. `TierError`: the folder cannot be written or has
    no room. `CaptureError`: the model has changed. `AgreementError`, by `Plan.apply`: ranks would
    run collectives in another order.
    """
    require_switches(compile=compile, audit=audit, cuda_graphs=cuda_graphs)
    refuse_wrappers(model)
    if isinstance(schedule, Family) or over is not None:
        from remat.graph_capture.tracing.option_pairs import require_compatible

        require_compatible(dynamic=True, compile=compile, cuda_graphs=cuda_graphs)
    if isinstance(schedule, Family):
        made = [one.schedule for one in schedule.members]
    else:
        _require_schedule(schedule)
        made = [schedule]
    if updates is None and any(one.updates for one in made):
        raise RewriteError(
            "make the plan again with remat.rematerialize(model, args, "
            "optimizer_in_backward=...): it updates parameters during backward, and has no "
            "optimizer"
        )
    if isinstance(schedule, Family):
        ranged = trace or _trace_range(model, schedule)
        refuse_range_over_ranks(ranged.joint.module)
        require_bits_over(ranged, schedule)
        how: Any = {"updates": updates, "audit": of_steps(audit), "code": code_by_size(compile)}
        return make_ranged(model, schedule, ranged, over, **how)
    if over is not None and compile:
        raise RewriteError(
            "solve over the range, or leave out compile=True: this schedule is of one size, and "
            "Inductor's code is made for each size that comes"
        )
    if not has_storage(model):
        raise RewriteError(
            "build the model with storage, and rewrite that with its batch: this "
            f"{type(model).__name__} is on the meta device and cannot train"
        )
    if over is not None:
        if trace is None and not isinstance(over, RangedGraph):  # pyright: ignore
            raise RewriteError(
                f"pass what remat.capture(..., dynamic=...) returned: over is {type(over).__name__}"
            )
        traced = trace or _trace_range(model, over)
        traced, schedule = as_planned_over(model, traced, schedule)
    elif trace is None:
        traced = _trace_for(model, schedule, args, kwargs, loss_fn, target)
    else:
        traced = _usable(trace, model, schedule)
    links = over.base.links if over is not None else links_of(traced, costed)
    found = require_valid(traced.graph, schedule, links)
    if trace is None and 0 < schedule.budget_bytes < found.peak_bytes:
        warnings.warn(
            f"solve again: this schedule has a peak of {found.peak_bytes} bytes here, above its "
            f"budget of {schedule.budget_bytes}, so it was edited or made with other sizes",
            stacklevel=2,
        )
    if compile:
        _warn_above_budget(traced, schedule)
    largest = None if over is None else over.bounding(over.symbols)
    module = module_for(
        model, schedule, traced, prediction, costed, updates,
        by_inductor=compile, audit=of_steps(audit), largest=largest,
    )  # fmt: skip
    if cuda_graphs:
        capture_steps(module)
    return module


def module_for(
    model: nn.Module, schedule: Schedule, traced: Trace, prediction: Prediction | None,
    costed: TrainingGraph | None, updates: Updates | None = None, *, by_inductor: bool = False,
    audit: Audits = "step", largest: TrainingGraph | None = None,
) -> RematModule:  # fmt: skip
    """The module that carries out `schedule`; `traced` has not been compiled. `largest`: the graph
    at the largest sizes of a range."""
    links, tier = links_of(traced, costed), None
    if largest is not None:
        links, tier = largest.links, tier_at_most(largest, schedule)
    step = compile_step(traced, schedule, by_inductor=by_inductor, links=links, tier=tier)
    return make_module(
        model, schedule, traced.recipe, step, traced.python_state, prediction, costed, updates,
        audit=audit,
    )  # fmt: skip


def code_by_size(compile: bool) -> MakeCode | None:
    if not compile:  # its import takes Inductor's seconds
        return None
    from remat.rewriter.inductor.code_by_size import CodeBySize

    return CodeBySize


def _warn_above_budget(traced: Trace, schedule: Schedule) -> None:
    from remat.rewriter.inductor.compiler import code_peak_bytes  # only where its code is asked for
    from remat.rewriter.inductor.lowering import ReplayError

    if not schedule.budget_bytes:  # made without a budget
        return
    try:
        peak_bytes = code_peak_bytes(traced, schedule)
    except ReplayError as error:
        warnings.warn(f"the peak of this compiled step is not known: {error}", stacklevel=3)
        return
    if peak_bytes > schedule.budget_bytes:
        warnings.warn(
            "use remat.rematerialize(..., compile=True), which looks for a plan whose code fits: "
            f"compiled, this plan has a peak of {peak_bytes} bytes, above its budget of "
            f"{schedule.budget_bytes}, as Inductor's kernels hold more than the plan's ops",
            stacklevel=3,
        )


def _require_schedule(given: Any) -> None:
    if isinstance(given, Schedule):
        return
    found = f"there is no schedule to rewrite to, only {given!r}"
    if isinstance(getattr(given, "schedule", None), Schedule):
        raise RewriteError(f"{found}: pass the schedule in it")
    raise RewriteError(
        f"{found}: where nothing fits, result.schedule is None, and result.message says what would"
    )


def _trace_for(
    model: nn.Module, schedule: Schedule, args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None, loss_fn: LossFunction | None, target: Any,
) -> Trace:  # fmt: skip
    recipe = recipe_for(model, schedule.captured_hash or schedule.graph_hash)
    if args is not None or kwargs is not None:
        traced = tracing.trace(
            model, args or (), kwargs, outputs=recipe and recipe.outputs,
            loss_fn=loss_fn, target=target, gradient_release=schedule.releases_gradients,
        )  # fmt: skip
        return _traced_again(model, traced.recipe, schedule) if schedule.captured_hash else traced
    if recipe is None:
        raise RewriteError(
            "pass the batch too, plan.apply(model, args, kwargs, loss_fn=..., target=...): this "
            f"{type(model).__name__} was not captured in this process for this plan"
        )
    return _traced_again(model, recipe, schedule)


def _usable(trace: Trace, model: nn.Module, schedule: Schedule) -> Trace:
    if trace.recipe.is_modelled:
        return _traced_again(model, trace.recipe, schedule)
    if not trace.compiled and trace.graph.hash == schedule.graph_hash:
        return trace
    # A trace of the step as captured lacks only the plan's edits, so it need not be traced again.
    captured = trace if trace.graph.hash == schedule.captured_hash else None
    return _traced_again(model, trace.recipe, schedule, captured)


def _trace_range(model: nn.Module, known: RangedGraph | Family) -> Trace:
    if (recipe := recipe_for(model, known.traced_hash)) is None:
        raise RewriteError(
            f"capture this {type(model).__name__} with dynamic=... here: it was not captured in "
            f"this process for the range {', '.join(map(str, known.symbols))}"
        )
    return tracing.trace_recipe(model, recipe)


def _traced_again(
    model: nn.Module, recipe: Recipe, schedule: Schedule, captured: Trace | None = None
) -> Trace:
    # A plan with other ops, as attention dropout for a GPU, is refused by its hash.
    device = CPU if recipe.is_modelled else recipe.device
    return trace_of_schedule(model, dataclasses.replace(recipe, device=device), schedule, captured)
