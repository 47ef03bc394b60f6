"""Batches of several shapes: a module that makes a plan when it first meets a shape."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, SupportsIndex

from torch import Tensor, nn

from remat.analysis.levers import levers_text
from remat.budgets import parse_budget
from remat.caches.known_plans import AtHand, KnownPlans, adopted, keep_solve, kept_solve
from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.distributed.collectives import collectives_in
from remat.graph_capture.distributed.dtensors import before_cast, is_sharded_by_fsdp
from remat.graph_capture.distributed.rank_refusals import refuse_wrappers
from remat.graph_capture.errors import (
    AuditError,
    BudgetError,
    CaptureError,
    FloatInputError,
    PlanError,
    RewriteError,
    SolverError,
    StateChangedError,
)
from remat.graph_capture.refusals import distributed_message, is_all_frozen
from remat.graph_capture.sizes.symbols import Dynamic
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.left_out import Outputs, as_outputs, outputs_of_caller
from remat.graph_capture.tracing.option_pairs import require_compatible
from remat.graph_capture.tracing.recipe import autocast_state
from remat.graph_capture.tracing.signature import tensor_facts
from remat.graph_capture.tracing.step_module import LossFunction
from remat.option_checks import require_dynamic, require_upto
from remat.ranges.ranged_call import rematerialize_over
from remat.ranges.varying import DynamicOrAuto, Upto, VaryingSizes, is_covered_by, planned_over
from remat.ranks.same_order import require_group
from remat.rewriter.checking.audit import Audit
from remat.rewriter.guards.wrapper import sharding_around
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import (
    RematModule,
    SharedState,
    original_of,
    tell_wrapper,
)
from remat.rewriter.user_module.own_forward import class_of_user
from remat.rewriter.user_module.ranged import RangedModule
from remat.solved import at_hand_text, facts_of
from remat.solver.table import make_solver
from remat.step_planner import StepPlanner, plan_one_size, whole_or_in_parts
from remat.step_spec import StepSpec


class _FloatPromotion:
    """Floats of Python's that have changed between steps: inputs of the plans that come."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._fixed: set[str] = set()

    def planned(self, changed: set[str], make: Callable[[Sequence[str]], nn.Module]) -> nn.Module:
        self._names |= changed - self._fixed
        names = set(self._names)
        while names:
            try:
                return make(sorted(names))
            except FloatInputError as error:
                if error.unfit:  # for its value now
                    names -= set(error.unfit)
                    continue
                self._fixed |= changed & names or names  # the last ones: others were inputs before
                names -= self._fixed
                self._names -= self._fixed
        return make(())


_MAX_PLANS = 16  # beyond, the oldest goes with a warning: planning each step is slow
_OFTEN = 3  # plans for one signature, beyond which it is said what keeps changing
_numbers = itertools.count()
_OF_A_BATCH = {"args", "kwargs", "target", "float_inputs"}
_WITH_A_BATCH = {"blocks": "blocks are", "optimizer_in_backward": "updates in backward are"}


class PlanCache(SharedState, nn.Module):
    """A module that shares every attribute with the user's, and trains by a plan for each shape.

    It has the user's ``__dict__`` itself. In training with gradients, a call runs by the plan for
    its signature: structure, shapes, strides, dtypes, other values, autocast. A new signature makes
    a plan, as does a change of what the code reads or is trained. A changed float is an input of
    the next plan. Other calls run the user's forward.
    """

    _remat_plans: ClassVar[OrderedDict[tuple[Any, int], Any]]  # prefixed, as others are the user's
    _remat_options: ClassVar[dict[str, Any]]
    _remat_max_plans: ClassVar[int]
    _remat_numbers: ClassVar[_FloatPromotion]
    _remat_sizes: ClassVar[VaryingSizes | None]
    _remat_stale: ClassVar[list[Any]]
    _remat_known: ClassVar[KnownPlans]

    @property
    def audit(self) -> Audit | None:
        type(self)._remat_last_used()  # which says what to do where there is none
        return next(reversed(type(self)._remat_plans.values())).audit

    @classmethod
    def _remat_last_used(cls) -> type[SharedState]:
        if not cls._remat_plans:
            raise PlanError("train a step first: this cache has made no plan yet")
        return type(next(reversed(cls._remat_plans.values())))

    def _remat_train(self, batch: Any) -> Any:
        cls, (args, kwargs, target) = type(self), batch
        cls._remat_unplanned.plan_runs()
        signature = cls._remat_signature(batch)
        given = kwargs if target is None else {**kwargs, "target": target}
        changed: list[StateChangedError] = []
        outgrown: list[Any] = []
        tried = [key for key in reversed(cls._remat_plans) if key[0] == signature]
        if cls._remat_sizes and cls._remat_sizes.is_planned_by_all(
            batch, is_served=any(cls._remat_holds(key, batch) for key in tried)
        ):
            tried, outgrown = [], [*cls._remat_plans]
        # The last used first: where Python's state differs, only a plan's own guards can tell.
        for key in tried:
            plan = cls._remat_plans[key]
            if not cls._remat_holds(key, batch):
                outgrown.append(key)  # dropped once a wider plan is there, as making it may fail
                continue
            try:
                result = plan.forward(*args, **given)
            except StateChangedError as error:
                changed.append(error)
                continue
            except AuditError:
                del cls._remat_plans[key]  # so that the next call makes another
                raise
            cls._remat_plans.move_to_end(key)
            return result
        if is_all_frozen(cls._remat_original_module, batch):
            cls._remat_unplanned.frozen(cls._remat_original_module)
            return cls._remat_run_original(*batch)
        if len(changed) >= _OFTEN:
            warnings.warn(
                "make what changes at every step a tensor, passed to forward or kept as a buffer: "
                f"this is plan {len(changed) + 1} for batches of one signature.\n{changed[0]}",
                stacklevel=7,
            )
        planned = cls._remat_over_range(batch)
        signature = cls._remat_signature(batch)  # its sizes may turn out to vary otherwise
        if planned is None:
            # Numbers alone can become inputs; any other change needs a plan of its own.
            names = {name for error in changed for name in error.numbers}
            make = functools.partial(cls._remat_planned, args, kwargs, target)
            planned = cls._remat_numbers.planned(names, make)
        else:
            cls._remat_drop_outgrown(outgrown, planned)
        cls._remat_known.took(_peak_bytes(planned))
        key = signature, next(_numbers)  # numbered, as one signature may have several plans
        cls._remat_plans[key] = planned
        cls._remat_drop_oldest()
        try:
            return planned.forward(*args, **given)
        except AuditError:
            del cls._remat_plans[key]
            cls._remat_known.forget()  # it is not to serve the next size either
            raise

    @classmethod
    def _remat_holds(cls, key: Any, batch: Any) -> bool:
        plan = cls._remat_plans[key]
        return not isinstance(plan, RangedModule) or type(plan)._remat_members.hold(batch)

    @classmethod
    def _remat_signature(cls, batch: Any) -> Hashable:
        if cls._remat_sizes is None:
            return _key(batch), cls._remat_used()
        signature, is_new = cls._remat_sizes.key(batch)
        if is_new:  # plans of that kind were for sizes that were thought not to vary
            stale = (key for key in cls._remat_plans if key[0][0] == signature[0])
            cls._remat_stale.extend(stale)
        return *signature, cls._remat_used()

    @classmethod
    def _remat_used(cls) -> Outputs | None:
        return cls._remat_outputs or outputs_of_caller(cls._remat_original_module)

    @classmethod
    def _remat_over_range(cls, batch: Any) -> RangedModule | None:
        """A plan for the range that a batch is of; None where a plan is for one size."""
        if cls._remat_sizes is None:
            return None

        def make(dynamic: Dynamic, *, as_far_as_fits: bool) -> RangedModule:
            spec = _as_wrapped(cls._remat_spec(*batch)).replace(dynamic=dynamic)
            return rematerialize_over(spec, as_far_as_fits=as_far_as_fits)

        return planned_over(cls._remat_sizes, batch, make)

    @classmethod
    def _remat_planned(
        cls, args: Any, kwargs: Any, target: Any, float_inputs: Sequence[str]
    ) -> nn.Module:
        spec = cls._remat_spec(args, kwargs, target).replace(float_inputs=float_inputs)
        if cls._remat_plans and not any(map(_has_collectives, cls._remat_plans.values())):
            spec = spec.replace(group=None)  # others may have a plan for theirs, and would not come
        peak_bytes = cls._remat_known.most_bytes

        def make(one: StepSpec) -> nn.Module:
            # `cached_plan` knows neither Inductor's code, nor other ranks, nor graphs.
            others = ("compile", "cuda_graphs", "group")
            is_alone = not any(one.asked[name] for name in others)
            known = cls._remat_known

            def whole(its: StepSpec) -> nn.Module:
                its = _as_wrapped(its)
                is_held_whole = its.sharding.kind == "none" or its.sharding.has_buckets
                if is_alone and is_held_whole:
                    return cached_plan(its, known)
                return plan_one_size(its)

            return whole_or_in_parts(one, whole)

        try:
            return make(spec)
        except BudgetError:
            if spec.parsed_budget.kind != "share" or not peak_bytes:
                raise
        # A per cent of a small last batch can be too little; the run has room for larger ones.
        return make(spec.replace(budget=f"{peak_bytes}B allocated"))

    @classmethod
    def _remat_spec(cls, args: Any, kwargs: Any, target: Any) -> StepSpec:
        given = {"model": cls._remat_original_module, "loss_fn": cls._remat_loss_fn}
        of_batch = {"args": args, "kwargs": kwargs, "target": target, "outputs": cls._remat_used()}
        return StepSpec.of({**cls._remat_options, **given, **of_batch})

    @classmethod
    def _remat_drop_outgrown(cls, outgrown: list[Any], planned: RangedModule) -> None:
        """Drop plans for smaller ranges, and those from before sizes were seen to vary."""
        within = [key for key in outgrown if is_covered_by(cls._remat_plans[key], planned)]
        for key in (*within, *cls._remat_stale):
            cls._remat_plans.pop(key, None)
        cls._remat_stale.clear()

    @classmethod
    def _remat_drop_oldest(cls) -> None:
        if len(cls._remat_plans) <= cls._remat_max_plans:
            return
        cls._remat_plans.popitem(last=False)
        warnings.warn(
            "pad batches to fewer shapes, or raise max_plans: "
            f"{type(cls._remat_original_module).__name__} was called with more than "
            f"{cls._remat_max_plans} signatures, so the least recently used plan is dropped",
            stacklevel=8,
        )

    @classmethod
    def _remat_recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sizes = cls._remat_sizes
        # What was asked, not what was learned: a copy learns from its own batches.
        asked = None if sizes is None else (sizes.dynamic, sizes.upto)
        options = cls._remat_max_plans, cls._remat_options
        return _make_cache, (cls._remat_original_module, cls._remat_loss_fn, *options, asked)


def plan_cache(
    model: nn.Module, *, budget: str | SupportsIndex, loss_fn: LossFunction | None = None,
    max_plans: int = _MAX_PLANS, dynamic: DynamicOrAuto | None = None, upto: Upto | None = None,
    **options: Any,
) -> PlanCache:  # fmt: skip
    """The module that `remat.rematerialize` returns without a batch; arguments are its own.

    A batch runs with every op once if that fits, or by an earlier plan that fits, or is planned.
    The first plan is compared with eager as a whole, reused schedules by their first outputs. Where
    the model fixes a size, each has a plan, and a warning says why.
    """
    resolved_device(None, model)
    model = original_of(model)  # a notebook cell that is run twice plans the user's model
    refuse_wrappers(model)
    if is_sharded_by_fsdp(model):
        raise CaptureError(distributed_message(next(iter(dict(model.named_parameters())), "")))
    if given := _OF_A_BATCH.intersection(options):
        raise TypeError(
            f"leave out {', '.join(sorted(given))}: without a batch, batches come with calls"
        )
    for name, what in _WITH_A_BATCH.items():
        if name in options:
            raise CaptureError(
                f"pass args, as in remat.rematerialize(model, (x,), {name}=..., budget=...): "
                f"{what} planned with a batch"
            )
    spec = StepSpec.of({"model": model, "budget": budget, "loss_fn": loss_fn, **options})
    parse_budget(spec.budget)  # refused when the model is wrapped, not at a batch
    _ = spec.tiers
    make_solver(spec.solver, **spec.options)
    if dynamic is not None or upto is not None:
        dynamic = dynamic or "auto"
        require_dynamic(model, dynamic, may_be_auto=True)
        require_upto(model, {} if upto is None else upto, dynamic)
        require_compatible(**spec.asked | {"dynamic": True})
    if type(max_plans) is not int or max_plans < 1:  # `True` would pass as 1
        raise SolverError(f"max_plans must be 1 or more, not {max_plans!r}")
    sizes = None if dynamic is None else (dynamic, upto)
    return _make_cache(model, loss_fn, max_plans, {"budget": budget, **options}, sizes)


def _make_cache(
    model: nn.Module, loss_fn: LossFunction | None, max_plans: int, options: dict[str, Any],
    sizes: tuple[DynamicOrAuto, Upto | None] | None,
) -> PlanCache:  # fmt: skip
    kind = class_of_user(
        PlanCache, model, loss_fn,
        _remat_plans=OrderedDict(), _remat_stale=[], _remat_known=KnownPlans(),
        _remat_options=options, _remat_max_plans=max_plans,
        _remat_outputs=as_outputs(options.get("outputs")),
        _remat_sizes=sizes and VaryingSizes(model, *sizes, options.get("group")),
        _remat_numbers=_FloatPromotion(),
    )  # fmt: skip
    return kind()


def planned_modules(cache: PlanCache) -> list[Any]:
    return list(type(cache)._remat_plans.values())


def _has_collectives(plan: Any) -> bool:
    graphs = (getattr(plan, name, None) for name in ("forward_module", "backward_module"))
    return any(graph is not None and collectives_in(graph) for graph in graphs)


def _peak_bytes(plan: Any) -> int:
    if isinstance(plan, RangedModule):
        return type(plan)._remat_family.budget_bytes
    prediction = type(plan)._remat_prediction
    return prediction.peak_bytes if prediction is not None else 0


def _key(batch: Any) -> Hashable:
    leaves, spec = pytree.tree_flatten(batch)
    # By type too: True, 1 and 1.0 are equal, and may make different steps.
    facts = [tensor_facts(x) if isinstance(x, Tensor) else (type(x), repr(x)) for x in leaves]
    return tuple(facts), spec, autocast_state()


def _as_wrapped(spec: StepSpec) -> StepSpec:
    """`spec`, told of the wrapper whose forward runs: what that holds counts in the budget."""
    if any(spec.asked[name] for name in ("compile", "cuda_graphs")):  # not planned for ranks
        return spec
    sharding, told = sharding_around(spec.model), spec.sharding
    if spec.asked["sharding"]:
        if sharding.kind == told.kind and sharding.param_dtype != told.param_dtype:
            raise RewriteError(
                f"plan with param_dtype={sharding.param_dtype!r} in remat.Sharding, or give "
                "fully_shard the MixedPrecisionPolicy that was told: "
                f"{type(spec.model).__name__} is to be planned for param_dtype="
                f"{told.param_dtype!r}"
            )
        return spec
    args, kwargs = before_cast(spec.args, spec.kwargs, sharding)
    return spec.replace(sharding=sharding, args=args, kwargs=kwargs)


def cached_plan(spec: StepSpec, known: KnownPlans) -> RematModule:
    """The module for a batch, as `remat.rematerialize` makes it; what it solves for is kept."""
    asked: dict[str, Any] = {"float_inputs": spec.float_inputs, "split": spec.split}
    planner = StepPlanner(spec, sharding=spec.sharding, **asked)
    require_group(planner.traced.joint.module, None)
    found = known.at_hand(planner.traced, spec.parsed_budget, may_keep_all=spec.may_keep_all)
    module = _module_at_hand(planner, found, known) if found else _solved(planner, known)
    tell_wrapper(module, spec.sharding, accumulates=spec.accumulate)
    return module


def _module_at_hand(planner: StepPlanner, found: AtHand, known: KnownPlans) -> RematModule:
    spec, traced = planner.spec, planner.traced
    # Once a model, a whole step is compared with eager's; later plans by their first outputs.
    is_compared = known.is_checked and spec.check is not False
    module = adopted(
        spec.model, traced, found.schedule, found.links, audit=spec.audit, is_compared=is_compared
    )
    budget_bytes = found.schedule.budget_bytes
    checked = None if known.is_checked else planner.compared(module, found.graph, budget_bytes)
    known.took(found.peak_bytes)
    known.is_checked = True
    facts = found.schedule, found.peak_bytes, checked, planner.stages.elapsed_s
    planner.stages.say(
        at_hand_text(
            traced.recipe.title, *facts, is_compared=is_compared, device=found.graph.device,
            levers=levers_text(found.graph, found.schedule), reserved_bytes=found.reserved_bytes,
        )
    )  # fmt: skip
    return module


def _solved(planner: StepPlanner, known: KnownPlans) -> RematModule:
    spec, traced = planner.spec, planner.traced
    graph = planner.costed(traced, chunks=not planner.may_wait())
    text = repr(sorted(spec.of_solve.items()))  # the order of options asks nothing else
    kept = kept_solve(graph, spec.parsed_budget, text, planner.in_chunks)
    found = kept or planner.required(planner.found(graph=graph))
    result, checked = found.result, None
    assert result.schedule is not None
    is_compared = kept is not None and spec.check is not False
    if kept:  # compared as a whole when it was solved for
        module = adopted(
            spec.model, traced, result.schedule, found.graph.links,
            audit=spec.audit, is_compared=is_compared, **facts_of(found),
        )  # fmt: skip
    else:
        facts = facts_of(found)
        module = rewrite(spec.model, result.schedule, trace=traced, audit=spec.audit, **facts)
        checked = planner.compared(module, found.graph, result.budget_bytes)
        keep_solve(graph, spec.parsed_budget, text, result)
    known.note(found)
    known.is_checked = True
    planner.say_planned(found, checked, is_compared=is_compared)
    return module
