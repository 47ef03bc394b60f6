"""The plan that a cache makes for a batch: at hand, kept on disk, or solved for, in this order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import nn

from remat.budgets import Budget, parse_budget
from remat.caches.known_plans import AtHand, KnownPlans, adopted, keep_solve, kept_solve
from remat.checks import (
    Batch,
    is_checked,
    require_equal,
    say_unchecked,
    unless_short,
)
from remat.graph_capture.capture_api import add_costs, tiers_for
from remat.graph_capture.costs.op_costs import with_measured_chunks
from remat.graph_capture.costs.profile import as_profile
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import Trace, trace
from remat.levers.by_tolerance import naming_tolerance
from remat.levers.chunks_at_need import may_wait, solved_at_need
from remat.progress import Stopwatch, solver_shown, stopwatch_of_call
from remat.ranks.same_order import require_group
from remat.reference import Reference, gradients_there
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.solved import Solved, at_hand_text, facts_of, infeasible_text, planned_text
from remat.solver.reductions.pin_globs import Globs, as_globs
from remat.solver.result import Result
from remat.solver.table import TAKE_CHUNKS

if TYPE_CHECKING:
    from remat.graph_capture.costs.profile import Profile
    from remat.graph_capture.tracing.recipe import Split
    from remat.rewriter.checking.check import Check

OF_OTHERS = {"compile", "group", "sharding"}
"""Options with which `remat.rematerialize` plans each batch, and nothing is at hand or kept."""


@dataclass(frozen=True)
class Wishes:
    """What a user asks of the plans of a cache, but for the budget; as of `rematerialize`.

    `more` : the options of the solver. `stages` : shows what is done.
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
    stages: Stopwatch = field(default_factory=Stopwatch)

    @property
    def of_solve(self) -> dict[str, Any]:
        """What a solve is given."""
        pins = {"keep": as_globs(self.keep), "recompute": as_globs(self.recompute)}
        return {"solver": self.solver, "time_limit_s": self.time_limit_s, **pins, **self.more}

    @property
    def may_keep_all(self) -> bool:
        """Whether a step that runs every op once is what a solve would give, where it fits."""
        return self.solver in TAKE_CHUNKS and not self.recompute


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
    verbose: bool = True,
    **options: Any,
) -> RematModule:
    """The module for a batch, as `remat.rematerialize` makes it; what it solves for is kept.

    Raises
    ------
    RematError : as of `remat.rematerialize`.
    """
    stages = stopwatch_of_call(verbose=verbose)
    wishes = Wishes(
        host, nvme, profile, solver, time_limit_s, keep, recompute, check, audit, options, stages
    )
    with stages.stage("capture", f"tracing {type(model).__name__}"):
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
    return _solved(model, batch, traced, known, budget, wishes)


def _module_at_hand(
    model: nn.Module, batch: Batch, traced: Trace, found: AtHand, known: KnownPlans, wishes: Wishes
) -> RematModule:
    """The module of a schedule at hand. Once a model, it is compared with eager as a whole."""
    is_compared = known.is_checked and wishes.check is not False
    module = adopted(
        model, traced, found.schedule, found.links, audit=wishes.audit, is_compared=is_compared
    )
    checked = None
    if not known.is_checked:
        checked = _compared_with_eager(
            model, module, batch, found.graph, found.schedule.budget_bytes, wishes
        )
    known.took(found.peak_bytes)
    known.is_checked = True
    said = at_hand_text(
        traced.recipe.title, found.schedule, found.peak_bytes, checked,
        wishes.stages.elapsed_s, is_compared=is_compared,
    )  # fmt: skip
    wishes.stages.say(said)
    return module


def _solved(
    model: nn.Module,
    batch: Batch,
    traced: Trace,
    known: KnownPlans,
    budget: str | SupportsIndex,
    wishes: Wishes,
) -> RematModule:
    """The module of a schedule that is kept on disk, or is solved for now."""
    question = _Question(model, traced, budget, wishes)
    is_whole = may_wait(traced, question.parsed)
    graph = question.costed(traced, chunks=not is_whole)
    text = repr(sorted(wishes.of_solve.items()))
    kept = kept_solve(graph, question.parsed, text, question.in_chunks)
    found = kept or question.solved(graph, is_whole=is_whole)
    result, checked = found.result, None
    assert result.schedule is not None
    is_compared = kept is not None and wishes.check is not False
    if kept:  # compared as a whole when it was solved for
        module = adopted(
            model, traced, result.schedule, found.graph.links,
            audit=wishes.audit, is_compared=is_compared, **facts_of(found),
        )  # fmt: skip
    else:
        module = rewrite(
            model, result.schedule, trace=traced, audit=wishes.audit, **facts_of(found)
        )
        checked = _compared_with_eager(
            model, module, batch, found.graph, result.budget_bytes, wishes
        )
        keep_solve(graph, question.parsed, text, result)
    known.note(found)
    known.is_checked = True
    stages = wishes.stages
    stages.say(
        planned_text(
            traced.recipe.title, result, checked, stages.elapsed_s, is_compared=is_compared
        )
    )
    return module


@dataclass(frozen=True)
class _Question:
    """A trace and a budget, for which a schedule is wanted."""

    model: nn.Module
    traced: Trace
    budget: str | SupportsIndex
    wishes: Wishes

    @property
    def parsed(self) -> Budget:
        """The budget as `parse_budget` reads it."""
        return parse_budget(self.budget)

    def costed(self, one: Trace, *, chunks: bool = True) -> TrainingGraph:
        """The graph of a trace, with costs; of what may run in chunks, if they are wanted."""
        wishes = self.wishes
        tiers = tiers_for(self.model, None, wishes.host, wishes.nvme)
        with wishes.stages.stage("profile", "timing ops") as shown:
            return add_costs(
                one, progress=shown, profile=as_profile(wishes.profile), tiers=tiers,
                most_bytes=self.parsed.most_bytes(one.graph), chunks=chunks,
            )  # fmt: skip

    def in_chunks(self, graph: TrainingGraph) -> TrainingGraph:
        """A graph with costs, also of what may run in chunks."""
        with self.wishes.stages.stage("profile", "timing large layers in chunks") as shown:
            return with_measured_chunks(self.traced, graph, shown)

    def solved(self, graph: TrainingGraph, *, is_whole: bool) -> Solved:
        """A schedule and the graph that it is of.

        Raises
        ------
        BudgetError : none fits.
        """
        if is_whole:
            found = solved_at_need(
                self.traced, graph, self._solve, self.in_chunks, self.wishes.stages
            )
        else:
            found = Solved(graph, self._solve(graph))
        if found.result.schedule is None:
            again = functools.partial(self._solve, budget_bytes=found.result.budget_bytes)
            lost = naming_tolerance(found.result, self.traced, found.graph, self.costed, again)
            raise BudgetError(infeasible_text(lost))
        return found

    def _solve(
        self, graph: TrainingGraph, /, *, budget_bytes: int | None = None, **known: Any
    ) -> Result:
        asked = self.parsed
        if budget_bytes is not None:
            asked = Budget("bytes", size_bytes=budget_bytes)
        with self.wishes.stages.stage("solve", f"solving for {self.budget}") as shown:
            listen = {"progress": solver_shown(shown, self.budget)}
            return asked.solve(graph, **listen, **self.wishes.of_solve, **known)


def _compared_with_eager(
    model: nn.Module,
    module: RematModule,
    batch: Batch,
    graph: TrainingGraph,
    budget_bytes: int,
    wishes: Wishes,
) -> Check | None:
    """Compare a step with eager's as a whole, as far as there is room, and its peak."""
    beside_bytes = gradients_there(model) if batch.accumulate else 0
    beside = Reference(graph, budget_bytes, beside_bytes)
    if not is_checked(graph, wishes.check, beside):
        return None
    with wishes.stages.stage("check", f"comparing a step of {type(model).__name__} with eager"):
        return unless_short(
            lambda: require_equal(model, module, batch, budget_bytes, beside), say_unchecked
        )
