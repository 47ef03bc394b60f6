"""Batches of several shapes: a module that makes a plan when it first meets a shape."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, SupportsIndex

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.budgets import parse_budget
from remat.graph_capture.errors import PlanError, RewriteError, SolverError
from remat.graph_capture.tracing.recipe import autocast_state
from remat.graph_capture.tracing.signature import tensor_facts
from remat.graph_capture.tracing.step_module import LossFunction
from remat.one_call import rematerialize
from remat.rewriter.user_module.module import RematModule
from remat.rewriter.user_module.own_forward import class_of_user
from remat.rewriter.user_module.shared_state import SharedState
from remat.schedules.schedule import Schedule

MAX_PLANS = 16
"""Plans that are kept. More are dropped with a warning: to plan at each step is slow."""
PLANNED_LATER = {"args", "kwargs", "target"}


class PlanCache(SharedState, nn.Module):
    """A module that shares every attribute with the user's, and trains by a plan for each shape.

    Like a rewritten module, it has the user's ``__dict__`` itself. A call in training mode with
    gradients enabled runs by the plan for its signature: structure, shapes, strides, dtypes,
    values of what is no tensor, and autocast. A new signature makes a plan. Any other call runs
    the user's own forward.
    """

    _plans: ClassVar[OrderedDict[Hashable, Any]]
    _options: ClassVar[dict[str, Any]]
    _max_plans: ClassVar[int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the user's forward takes, and ``target`` where there is a loss.

        Raises
        ------
        RematError : as `remat.rematerialize`, where the batch is the first of its signature.
        """
        own = type(self)
        target = kwargs.pop("target", None) if own._loss_fn is not None else None
        if self.training and torch.is_grad_enabled():
            given = kwargs if target is None else {**kwargs, "target": target}
            return own._plan_for(args, kwargs, target)(*args, **given)
        return own._run_original(args, kwargs, target)

    @classmethod
    def _last_used(cls) -> type[SharedState]:
        if not cls._plans:
            raise PlanError("this cache has made no plan yet: train a step first")
        return type(next(reversed(cls._plans.values())))

    @classmethod
    def _plan_for(cls, args: Any, kwargs: Any, target: Any) -> Any:
        key = _key((args, kwargs, target))
        found = cls._plans.get(key)
        if found is None:
            found = rematerialize(
                cls.original_module, args, kwargs,
                target=target, loss_fn=cls._loss_fn, **cls._options,
            )  # fmt: skip
            cls._plans[key] = found
            cls._drop_oldest()
        cls._plans.move_to_end(key)
        return found

    @classmethod
    def _drop_oldest(cls) -> None:
        if len(cls._plans) <= cls._max_plans:
            return
        cls._plans.popitem(last=False)
        warnings.warn(
            f"{type(cls.original_module).__name__} was called with more than {cls._max_plans} "
            "signatures, and the plan that was used longest ago is given up: pad batches to "
            "fewer shapes, or raise max_plans",
            stacklevel=8,
        )

    @classmethod
    def _over(cls, model: nn.Module) -> PlanCache:
        """A cache with the same options and no plan yet."""
        return _make_cache(model, cls._loss_fn, cls._max_plans, cls._options)

    @classmethod
    def _recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _make_cache, (cls.original_module, cls._loss_fn, cls._max_plans, cls._options)


def plan_cache(
    model: nn.Module,
    *,
    budget: str | SupportsIndex,
    loss_fn: LossFunction | None = None,
    max_plans: int = MAX_PLANS,
    **options: Any,
) -> PlanCache:
    """A module that trains as `model` does, within `budget`, for batches of several shapes.

    Parameters
    ----------
    budget, loss_fn, **options : as of `remat.rematerialize`, for each plan. Per cents are of the
        unmodified peak at each shape.
    max_plans : how many plans are kept. One more drops the plan that was used longest ago, with a
        warning.

    Raises
    ------
    BudgetError : the budget cannot be read. SolverError : `max_plans` is below 1.
    RewriteError : `model` is rewritten already.
    """
    parse_budget(budget)
    if max_plans < 1:
        raise SolverError(f"max_plans must be 1 or more, not {max_plans}")
    if isinstance(model, (RematModule, PlanCache)):
        raise RewriteError("this module follows a plan already: make a cache of the original")
    if given := PLANNED_LATER.intersection(options):
        raise TypeError(f"plan_cache takes no {', '.join(sorted(given))}: batches come with calls")
    return _make_cache(model, loss_fn, max_plans, {"budget": budget, **options})


def _make_cache(
    model: nn.Module, loss_fn: LossFunction | None, max_plans: int, options: dict[str, Any]
) -> PlanCache:
    kind = class_of_user(
        PlanCache,
        model,
        loss_fn,
        original_module=model,
        _plans=OrderedDict(),
        _options=options,
        _loss_fn=staticmethod(loss_fn) if loss_fn else None,
        _max_plans=max_plans,
    )
    return kind()


def plans_of(cache: PlanCache) -> list[Schedule]:
    """The schedules that are kept, the last used one last."""
    return [plan.schedule for plan in type(cache)._plans.values()]


def _key(batch: Any) -> Hashable:
    """The signature of a batch and the autocast it comes under."""
    leaves, spec = pytree.tree_flatten(batch)
    facts = (
        tensor_facts(leaf) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return tuple(facts), spec, autocast_state()
