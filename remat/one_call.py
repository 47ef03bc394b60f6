"""`remat.solve` and `remat.rematerialize`: a plan, or a module that follows it, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from remat.budgets import parse_budget
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Optimizer, TrainingGraph, TrainingStep
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.plan import Plan
from remat.schedules.value_report.globs import Globs, as_globs
from remat.solver.table import check_number

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer as TorchOptimizer

    from remat.graph_capture.costs.cache import Profile
    from remat.graph_capture.sizes.symbols import Dynamic
    from remat.graph_capture.tracing.recipe import Split
    from remat.whole_step.running import WholeStep


def solve(
    step: TrainingStep,
    budget: str | SupportsIndex,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    *,
    keep: Globs = (),
    recompute: Globs = (),
    **options: Any,
) -> Plan:
    """The fastest schedule of `step` within `budget` that `solver` finds.

    Parameters
    ----------
    step : of `remat.capture`, with costs. Over a range of sizes the plan has a few schedules, of
        which one serves each size, all within the budget, which is proved.
    budget : bytes as an int, or ``"8GiB"``, ``"60%"`` of the unmodified peak, ``"auto"`` for what
        is free, ``"min"`` for the least peak known. On a CUDA device bytes and ``"auto"`` bound
        what its allocator reserves; ``"8GiB allocated"`` bounds tensors alone (docs/reserved.md).
    solver : a name of `remat.solver`'s table.
    time_limit_s : wall clock, in seconds.
    keep : globs over module paths, such as ``"*.attn"``: what forward computes there is never
        recomputed. A glob covers all modules below those it matches.
    recompute : globs as well: what backward reads of these modules is computed again in backward.
    **options : of that solver; of `auto` for example ``order="free"``, which also tries
        other orders of first computations than the captured one.

    Returns
    -------
    Plan : also where nothing fits; its schedule then is None.

    Raises
    ------
    BudgetError : the budget cannot be read; or nothing fits at the largest sizes of a range, and it
        names the largest that fit. SolverError : an unknown solver or option, an op pinned both
        ways. RematError : a glob matches nothing.
    """
    check_number("time_limit_s", time_limit_s)
    pins = {"keep": as_globs(keep), "recompute": as_globs(recompute)}
    if isinstance(step, RangedGraph):
        from remat.ranges.curve import solve_over

        family = solve_over(step, budget, solver, time_limit_s, **pins, **options)
        return Plan.from_family(family, step)
    if not isinstance(step, TrainingGraph):
        raise SolverError(
            "pass what remat.capture returned: a plan is made for a step, and this is "
            f"{type(step).__name__}"
        )
    result = parse_budget(budget).solve(step, solver, time_limit_s=time_limit_s, **pins, **options)
    return Plan.from_result(result, step=step)


@overload
def rematerialize(
    model: nn.Module, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None,
    *, budget: str | SupportsIndex, microbatches: int, **options: Any,
) -> WholeStep: ...  # fmt: skip
@overload
def rematerialize(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | SupportsIndex,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    host: str | SupportsIndex | None = None,
    nvme: str | None = None,
    optimizer_in_backward: TorchOptimizer | None = None,
    microbatches: None = None,
    compile: bool = False,
    cuda_graphs: bool = False,
    split: Split | None = None,
    dynamic: Dynamic | Literal["auto"] | None = None,
    float_inputs: Sequence[str] = (),
    outputs: Sequence[str | int] | None = None,
    blocks: str | None = None,
    sharding: Sharding = NO_SHARDING,
    group: ProcessGroup | None = None,
    keep: Globs = (),
    recompute: Globs = (),
    solver: str = "auto",
    time_limit_s: float = 60.0,
    profile: Profile | str | Path | None = None,
    check: bool | None = None,
    audit: bool = True,
    verbose: bool = True,
    **options: Any,
) -> nn.Module: ...
def rematerialize(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | SupportsIndex,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    host: str | SupportsIndex | None = None,
    nvme: str | None = None,
    optimizer_in_backward: TorchOptimizer | None = None,
    microbatches: int | None = None,
    compile: bool = False,
    cuda_graphs: bool = False,
    split: Split | None = None,
    dynamic: Dynamic | Literal["auto"] | None = None,
    float_inputs: Sequence[str] = (),
    outputs: Sequence[str | int] | None = None,
    blocks: str | None = None,
    sharding: Sharding = NO_SHARDING,
    group: ProcessGroup | None = None,
    keep: Globs = (),
    recompute: Globs = (),
    solver: str = "auto",
    time_limit_s: float = 60.0,
    profile: Profile | str | Path | None = None,
    check: bool | None = None,
    audit: bool = True,
    verbose: bool = True,
    **options: Any,
) -> nn.Module | WholeStep:
    """A module that trains as `model` does, to the same bits, within `budget`.

    It shares the parameters and buffers of `model`, under the same names, and trains on the
    device that they are on. Of a model that follows a plan already, the original is planned. One
    that is no one graph is planned in parts: some modules run again, each as a whole.

    With a batch, `args` or `kwargs`, it is planned now, for batches like that one. Without one it
    is planned when it is first called, as `torch.compile` compiles, and again for batches of other
    sizes that no plan at hand serves; these plans are kept on disk for later processes.

    Parameters
    ----------
    args, kwargs : one batch, as forward takes it.
    budget : bytes as an int, or ``"8GiB"``, ``"60%"`` of the unmodified peak, ``"auto"`` for what
        is free, ``"min"`` for the least peak known, as of `remat.solve`. Without a batch, a later
        batch may in any case take as much as an earlier plan does.
    loss_fn, target : where given, ``loss_fn(output, target)`` (or ``loss_fn(output)``) is part of
        the step, and the result returns its value. Without a batch, calls bring the target.
    optimizer, accumulate : what stays allocated between steps, as of `remat.capture`.
    host, nvme : memory below the device that values may move to, as of `remat.capture`: a plan then
        may copy a value there and back, where that is cheaper than to compute it again.
    optimizer_in_backward : of `torch.optim`: an `SGD`, `Adam` or `AdamW`, single-tensor, foreach or
        fused, over parameters of the model. ``backward()`` then takes its step for each parameter
        as soon as the gradient is there and nothing reads the parameter any more, and lets go of
        the gradient; parameters are those of eager to the bit. ``optimizer.step()`` in a loop finds
        no gradients. With `accumulate`, ``with module.no_update():`` around all batches but the
        last holds updates back, as ``no_sync`` of DDP does gradients.
    microbatches : batches like this one in one optimizer step, which the result takes as a whole,
        with `optimizer_in_backward`. Parameters, gradients and the optimizer's state are then on
        the device, the `host` or `nvme`, as is best. It runs on a CPU; `remat run --microbatches`
        plans it for a GPU of the table.
    compile : let Inductor make the code, of a plan whose code keeps to the budget. Random numbers
        are eager's; all else is equal to a tolerance, and not to the bit. Ops have eager's costs;
        `torch.compile(model, backend="remat")` plans with those of Inductor's kernels.
    cuda_graphs : on a CUDA device, capture the second step as two CUDA graphs and replay them from
        then on, without the host time of ops. They take memory beside the budget, and refuse what
        they cannot repeat exactly: docs/arena.md says what. Not tried on a device yet.
    split : ``exact`` lets a linear head with its cross-entropy run in chunks where that gives
        eager's bits, ``tolerance`` also where a sum has another order, and ``none`` never. Left
        out, it is ``exact`` for large heads, but ``none`` with `compile`, `sharding` or `group`.
    dynamic : dimensions of the batch that vary, as of `remat.capture`. One trace then serves all
        sizes of their ranges, and a few schedules, of which the size of a batch picks one. The
        budget holds at every size, which is proved; per cents are of the largest sizes. The batch
        at hand need not be the largest. Without a batch also ``"auto"``, which learns from the
        first batches which sizes vary; a larger batch than the range holds extends it. ``upto``
        then names the largest sizes to come, such as ``{"tokens": {1: 2048}}``, so that what cannot
        fit fails at the start.
    float_inputs : numbers of Python's that each step reads anew, so that one plan serves for all
        their values: a temperature, a drop rate. Their names are those that a refusal gives them,
        such as ``"temperature"`` or ``"layers.0.drop.p"``. Without a batch, those that change are.
    outputs : those of forward's results that training uses, such as ``("loss",)``: keys of a dict,
        attributes of a dataclass, or positions in a tuple. Others are left out of the training
        step; what stands in their place is an error to read. Left out, all are returned, but to
        Hugging Face's ``Trainer.compute_loss`` the loss alone, where it reads nothing else.
    blocks : glob over module paths, such as ``"layers.*"``: each module that matches is rewritten
        by itself, so that it can still be wrapped, as by `fully_shard`; what lies outside runs as
        it does in `model`. The budget is that of the whole step. Of two modules that match, one
        inside the other, the outer one is the block. A loss is used to plan, and applied by you.
    sharding : how you will wrap the result, by DDP or `fully_shard`; the budget then is that of one
        rank. To wrap blocks too, give `blocks`.
    group : ranks that are to follow the same plan: the first makes it. All of them must call. A
        model with collectives needs it. With `dynamic` their batches may differ in size; without
        a batch, all plan where one of them must, for which each step exchanges a number. Without
        both, they make the first plan together; later each plans the shapes that it meets.
    keep, recompute, solver, time_limit_s, **options : as of `remat.solve`. Without a batch also
        ``max_plans``, 16 if left out: one more drops the plan that was used longest ago.
    profile : as of `remat.capture`.
    check : run a step of both modules and compare them, as `remat.check` does, before
        returning. None does so if the unmodified step fits into free memory, and warns if it
        does not. With a sharding the peak is not compared with the budget, as the wrapper's
        buffers are not there yet.
    audit : run the model's own forward, and the loss, beside the planned one at steps 2, 4, 8 and
        so on and at every thousandth, and end with a `PlanError` where results differ: something
        that forward reads has changed, and no guard knows of it. What forward writes is put back.
        ``type(module).audit.why_not`` says why steps are not audited: the forward has no room in
        the plan's peak, or runs ops of yours, which may count. With False nothing is.
    verbose : show on a terminal what is done, and in one line what the plan is; where standard
        error is none, Python's log ``remat`` has both, at its level INFO. With False neither does.

    Options that do not go together are refused at once: docs/limits.md has the table.

    Returns
    -------
    A `WholeStep` with `microbatches`: called with that many batches, it takes eager's step. Else an
    `fx.GraphModule` for one size; a module that holds several plans for a range of sizes, or
    without a batch; with `blocks`, the model with its blocks replaced; in parts, a module whose
    `modules_again` are the paths of those that run again.

    Raises
    ------
    BudgetError : no schedule fits; the message names the least budget that is known to fit, or of
        a range the largest sizes that fit.
    CaptureError : the model, or the optimizer in backward, cannot be planned exactly; or options
        exclude each other.
    CheckError : the check found a difference. PlanError : a measured peak is above the budget.
    RematError : an option is unknown; or ranks of the group have different models or batches, one
        of them has failed, or the model has collectives with ranks outside of the group.
    """
    given = {**locals()}
    from remat.step_spec import StepSpec, is_default

    given |= given.pop("options")
    if microbatches is not None:
        from remat.whole_step.on_this_device import whole_step_here

        return whole_step_here(given)
    if args is None and kwargs is None:
        from remat.caches.per_shape_plans import plan_cache

        # A default says nothing, and some options mean nothing without a batch.
        said = {name: value for name, value in given.items() if not is_default(name, value)}
        return plan_cache(**{k: v for k, v in said.items() if k not in ("args", "kwargs")})
    spec = StepSpec.of(given | {"args": () if args is None else args})
    if spec.blocks is not None:
        from remat.blocks.rematerialized import blocks_planned

        return blocks_planned(spec)
    if spec.dynamic:
        from remat.ranges.ranged_call import rematerialize_over

        return rematerialize_over(spec)
    from remat.step_planner import plan_one_size, whole_or_in_parts

    return whole_or_in_parts(spec, plan_one_size)
