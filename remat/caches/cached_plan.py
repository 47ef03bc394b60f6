"""The plan that a cache makes for a batch: at hand, kept on disk, or solved for, in this order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import nn

from remat.budgets import Budget, parse_budget
from remat.caches.kept_solves import keep_solve, kept_solve
from remat.caches.known_plans import AtHand, KnownPlans, adopted
from remat.checks import Batch, is_checked, require_equal, say_unchecked, unless_short
from remat.graph_capture.capturing import price_for, tiers_for
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.prices.profile import as_profile
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.trace import trace
from remat.infeasible import infeasible_text
from remat.levers.by_tolerance import naming_tolerance
from remat.ranks.required_group import require_group
from remat.reference import Reference, gradients_there
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.solved import Solved, facts_of
from remat.solver.pins.globs import Globs, as_globs
from remat.solver.result import Result
from remat.solver.table import TAKE_PIECES

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile
    from remat.graph_capture.tracing.recipe import Split

OF_OTHERS = {"compile", "group", "sharding"}
"""Options with which `remat.rematerialize` plans each batch, and nothing is at hand or kept."""


@dataclass(frozen=True)
class Wishes:
    """What a user asks of the plans of a cache, but for the budget; as of `rematerialize`.

    `more` : the options of the solver.
    """

    host: str | SupportsIndex | None
    nvme: str | None
    profile: Profile | str | Path | None
    solver: str
    time_limit_s: float
    keep: Globs
    recompute: Globs
    check: bool | None
    audit: bool
    more: dict[str, Any]

    @property
    def of_solve(self) -> dict[str, Any]:
        """What a solve is given."""
        pins = {"keep": as_globs(self.keep), "recompute": as_globs(self.recompute)}
        return {"solver": self.solver, "time_limit_s": self.time_limit_s, **pins, **self.more}

    @property
    def may_keep_all(self) -> bool:
        """Whether a step that runs every op once is what a solve would give, where it fits."""
        return self.solver in TAKE_PIECES and not self.recompute


def cached_plan(
    model: nn.Module,
    batch: Batch,
    known: KnownPlans,
    *,
    budget: str | SupportsIndex,
    float_inputs: Sequence[str] = (),
    split: Split | None = None,
    host: str | SupportsIndex | None = None,
    nvme: str | None = None,
    profile: Profile | str | Path | None = None,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    keep: Globs = (),
    recompute: Globs = (),
    check: bool | None = None,
    audit: bool = True,
    **options: Any,
) -> RematModule:
    """The module for a batch, as `remat.rematerialize` makes it; what it solves for is kept.

    Raises
    ------
    RematError : as of `remat.rematerialize`.
    """
    wishes = Wishes(
        host, nvme, profile, solver, time_limit_s, keep, recompute, check, audit, options
    )
    traced = trace(
        model, batch.args, batch.kwargs, loss_fn=batch.loss_fn, target=batch.target,
        optimizer=batch.optimizer, accumulate=batch.accumulate,
        float_inputs=float_inputs, split=split,
    )  # fmt: skip
    require_group(traced.joint.module, None)
    asked = parse_budget(budget)
    found = known.at_hand(traced, asked, may_keep_all=wishes.may_keep_all)
    if found is not None:
        return _module_at_hand(model, batch, traced, found, known, wishes)
    return _solved(model, batch, traced, known, asked, wishes)


def _module_at_hand(
    model: nn.Module, batch: Batch, traced: Trace, found: AtHand, known: KnownPlans, wishes: Wishes
) -> RematModule:
    """The module of a schedule at hand. Once a model, it is compared with eager as a whole."""
    is_compared = known.is_checked and wishes.check is not False
    module = adopted(
        model, traced, found.schedule, found.links, audit=wishes.audit, is_compared=is_compared
    )
    if not known.is_checked:
        _compare_with_eager(model, module, batch, found.graph, found.schedule.budget_bytes, wishes)
    known.took(found.peak_bytes)
    known.is_checked = True
    return module


def _solved(
    model: nn.Module, batch: Batch, traced: Trace, known: KnownPlans, budget: Budget, wishes: Wishes
) -> RematModule:
    """The module of a schedule that is kept on disk, or is solved for now."""
    profile, tiers = as_profile(wishes.profile), tiers_for(model, None, wishes.host, wishes.nvme)

    def priced(one: Trace) -> TrainingGraph:
        most_bytes = budget.most_bytes(one.graph)
        return price_for(one, profile=profile, tiers=tiers, most_bytes=most_bytes)

    graph, text = priced(traced), repr(sorted(wishes.of_solve.items()))
    kept = kept_solve(graph, budget, text)
    result = kept or _solve(traced, graph, budget, priced, wishes)
    found = Solved(graph, result)
    assert result.schedule is not None
    if kept:  # compared as a whole when it was solved for
        module = adopted(
            model, traced, result.schedule, graph.links,
            audit=wishes.audit, is_compared=wishes.check is not False, **facts_of(found),
        )  # fmt: skip
    else:
        module = rewrite(
            model, result.schedule, trace=traced, audit=wishes.audit, **facts_of(found)
        )
        _compare_with_eager(model, module, batch, graph, result.budget_bytes, wishes)
        keep_solve(graph, budget, text, result)
    known.note(found)
    known.is_checked = True
    return module


def _solve(
    traced: Trace,
    graph: TrainingGraph,
    budget: Budget,
    priced: Callable[[Trace], TrainingGraph],
    wishes: Wishes,
) -> Result:
    """A result with a schedule.

    Raises
    ------
    BudgetError : none fits.
    """
    result = budget.solve(graph, **wishes.of_solve)
    if result.schedule is None:
        within = Budget("bytes", size_bytes=result.budget_bytes)
        again = functools.partial(within.solve, **wishes.of_solve)
        lost = naming_tolerance(result, traced, graph, priced, again)
        raise BudgetError(infeasible_text(lost))
    return result


def _compare_with_eager(
    model: nn.Module,
    module: RematModule,
    batch: Batch,
    graph: TrainingGraph,
    budget_bytes: int,
    wishes: Wishes,
) -> None:
    """Compare a step with eager's as a whole, as far as there is room, and its peak."""
    beside_bytes = gradients_there(model) if batch.accumulate else 0
    beside = Reference(graph, budget_bytes, beside_bytes)
    if is_checked(graph, wishes.check, beside):
        unless_short(
            lambda: require_equal(model, module, batch, budget_bytes, beside), say_unchecked
        )
