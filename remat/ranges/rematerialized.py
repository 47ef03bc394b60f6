"""`remat.rematerialize(dynamic=...)`: a module for a range of sizes in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec
import torch.utils._pytree as pytree
from torch import nn

from remat.budgets import Budget, parse_budget
from remat.checks import Batch, is_checked, require_equal, say_unchecked, unless_short
from remat.graph_capture.capturing import price_for, workspaces_by
from remat.graph_capture.errors import SignatureError, TooLargeError
from remat.graph_capture.graph import Optimizer, TrainingGraph
from remat.graph_capture.prices.profile import as_profile
from remat.graph_capture.prices.step_time import is_beyond
from remat.graph_capture.shapes.at_sizes import ranged_graph_of
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.graph_capture.shapes.ranges import Dynamic, Sizes, require_in_range
from remat.graph_capture.shapes.signature import RangedSignature
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.trace import trace
from remat.ranges.solving import solve_over
from remat.ranks.required_group import ONE_RANK, require_group
from remat.reference import Reference, gradients_there
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.screen.stages import stopwatch_of_call
from remat.solved import family_text
from remat.solver.pins.globs import Globs, as_globs

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile
    from remat.graph_capture.tracing.trace import Shown


def rematerialize_over(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic: Dynamic,
    *,
    budget: str | SupportsIndex,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    profile: Profile | str | Path | None = None,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    keep: Globs = (),
    recompute: Globs = (),
    check: bool | None = None,
    audit: bool = True,
    verbose: bool = True,
    as_far_as_fits: bool = False,
    **options: Any,
) -> RangedModule:
    """A module that trains as `model` does at every size of a range, within `budget`.

    Parameters
    ----------
    args, kwargs : a batch of the range, with which the module is checked; or of other sizes, of
        which only types and dimensions count.
    as_far_as_fits : where nothing fits at the largest sizes, plan up to the largest that fit, if
        the batch is among them.
    Others : as of `remat.rematerialize`.
    """
    stages, name = stopwatch_of_call(verbose=verbose), type(model).__name__
    known = as_profile(profile)
    batch = Batch(args, kwargs, loss_fn, target, optimizer, accumulate)
    with stages.stage("capture", f"tracing {name} over a range of sizes"):
        traced = trace(
            model, args, kwargs, loss_fn=loss_fn, target=target,
            optimizer=optimizer, accumulate=accumulate, dynamic=dynamic,
        )  # fmt: skip
    require_group(traced.joint.module, None, ONE_RANK.format(what="a plan over a range of sizes"))
    with stages.stage("profile", "timing ops at several sizes") as shown:
        graph = ranged_graph_of(
            traced, _priced_within(parse_budget(budget), known, shown),
            workspaces_by(traced, known),
        )  # fmt: skip
    asked = {"keep": as_globs(keep), "recompute": as_globs(recompute), **options}
    sizes = sizes_within(traced, batch)
    with stages.stage("solve", f"solving for {budget} at the sizes of the range"):
        try:
            family = solve_over(graph, budget, solver, time_limit_s, **asked)
        except TooLargeError as error:
            if not as_far_as_fits or sizes is None or not _hold(error.largest, sizes):
                raise
            traced, graph = _narrowed(traced, graph, error.largest)
            family = solve_over(graph, error.budget_bytes, solver, time_limit_s, **asked)
    first = None if sizes is None else family.number_at(**sizes)
    module = make_ranged(model, family, traced, graph, first, audit=of_steps(audit))
    checked = None
    if sizes is not None:
        at_sizes, most_bytes = graph.at(**sizes), family.budget_bytes
        beside = Reference(at_sizes, most_bytes, gradients_there(model) if accumulate else 0)
        if is_checked(at_sizes, check, beside):
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(
                    lambda: require_equal(model, module, batch, most_bytes, beside), say_unchecked
                )
    stages.say(family_text(family, checked, stages.elapsed_s))
    return module


def _priced_within(
    budget: Budget, known: Profile | None, shown: Shown
) -> Callable[[Trace], TrainingGraph]:
    """Prices at each size. Where the largest step cannot be timed within the budget, none is."""
    left_out: list[bool] = []

    def priced(one: Trace) -> TrainingGraph:
        if not left_out:
            left_out.append(is_beyond(one.joint, one.graph, budget.most_bytes(one.graph)))
        most_bytes = 0 if left_out[0] else None
        return price_for(one, progress=shown, profile=known, most_bytes=most_bytes)

    return priced


def _hold(largest: Sizes, sizes: Sizes) -> bool:
    return bool(largest) and all(size <= largest[name] for name, size in sizes.items())


def _narrowed(traced: Trace, graph: RangedGraph, largest: Sizes) -> tuple[Trace, RangedGraph]:
    """The trace and the graph of a range, for its sizes up to `largest`."""
    symbols = tuple(msgspec.structs.replace(s, high=largest[s.name]) for s in graph.symbols)
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    recipe = dataclasses.replace(traced.recipe, signature=signature.within(symbols))
    narrowed = msgspec.structs.replace(graph, symbols=symbols)
    return dataclasses.replace(traced, recipe=recipe), narrowed


def sizes_within(traced: Trace, batch: Batch) -> dict[str, int] | None:
    """The sizes of a batch; None if they are out of the range that was traced."""
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    leaves = pytree.tree_leaves((batch.args, dict(batch.kwargs or {}), batch.target))
    try:
        return require_in_range(signature.symbols, signature.sizes_of(leaves))
    except SignatureError:
        return None
