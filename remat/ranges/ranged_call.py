"""`remat.rematerialize(dynamic=...)`: a module for a range of sizes in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import SupportsIndex

import msgspec

from remat.budgets import Budget
from remat.checks import (
    Batch,
    Reference,
    gradients_there,
    is_checked,
    require_equal,
    say_unchecked,
    unless_short,
)
from remat.graph_capture.capture_api import add_costs, workspaces_by
from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.costs.step_time import is_beyond
from remat.graph_capture.errors import SignatureError, TooLargeError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.at_sizes import ranged_graph_of
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import Sizes, require_in_range
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.trace import ProgressCallback, Trace, trace
from remat.levers.optimizer_in_backward import release_of, updates_of
from remat.progress import stopwatch_of_call
from remat.ranges.curve import solve_over
from remat.ranks.same_order import ONE_RANK, require_group
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.rewriting import code_by_size
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.schedules.family import Family
from remat.solved import family_text
from remat.step_spec import StepSpec


def rematerialize_over(spec: StepSpec, *, as_far_as_fits: bool = False) -> RangedModule:
    """A module that trains at all sizes of a range; `as_far_as_fits`: at as many as fit."""
    model, budget, dynamic = spec.model, spec.budget, spec.dynamic
    stages, name = stopwatch_of_call(verbose=spec.verbose), type(model).__name__
    known, batch = spec.known_profile, spec.batch
    with stages.stage("capture", f"tracing {name} over a range of sizes"):
        traced = trace(
            model,
            **spec.of_trace,
            dynamic=dynamic,
            float_inputs=spec.float_inputs,
            gradient_release=release_of(spec),
        )
    require_group(traced.joint.module, None, ONE_RANK.format(what="a plan over a range of sizes"))
    with stages.stage("profile", "timing ops at several sizes") as shown:
        costed = _costs_within(spec.parsed_budget, known, shown)
        graph = ranged_graph_of(traced, costed, workspaces_by(traced, known))
    sizes = sizes_within(traced, batch)
    with stages.stage("solve", f"solving for {budget} at the sizes of the range"):
        try:
            family = _family_over(spec, traced, graph, budget)
        except TooLargeError as error:
            largest = error.largest
            if not as_far_as_fits or sizes is None or not largest:
                raise
            if any(size > largest[name] for name, size in sizes.items()):
                raise
            traced, graph = _narrowed(traced, graph, largest)
            # In bytes: a per cent of the narrower range would be less.
            family = _family_over(spec, traced, graph, error.budget_bytes)
    first = None if sizes is None else family.number_at(**sizes)
    updates = updates_of(spec, traced)
    made = first, updates
    module = make_ranged(
        model,
        family,
        traced,
        graph,
        *made,
        audit=of_steps(spec.audit),
        code=code_by_size(spec.compile),
    )
    checked = None
    if sizes is not None:
        at_sizes, most_bytes = graph.at(**sizes), family.budget_bytes
        beside = Reference(at_sizes, most_bytes, gradients_there(model) if spec.accumulate else 0)
        if is_checked(at_sizes, spec.check, beside):
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(
                    lambda: require_equal(
                        model, module, batch, None if updates else most_bytes, beside
                    ),
                    say_unchecked,
                )
    said = family_text(family, checked, stages.elapsed_s, traced.graph.device)
    stages.say(f"{said}{_COMPILED if spec.compile else ''}")
    return module


_COMPILED = "; Inductor compiles each size that comes, and keeps 16"


def _family_over(
    spec: StepSpec, traced: Trace, graph: RangedGraph, budget: str | SupportsIndex
) -> Family:
    """The family for a budget; of one that is compiled, its code at the largest sizes fits too."""

    def solve(budget: str | SupportsIndex) -> Family:
        return solve_over(graph, budget, **spec.of_solve)

    if not spec.compile:
        return solve(budget)
    from remat.compile.code_plans import family_with_fitting_code

    return family_with_fitting_code(traced, solve, budget)


def _costs_within(
    budget: Budget, known: Profile | None, shown: ProgressCallback
) -> Callable[[Trace], TrainingGraph]:
    left_out: list[bool] = []

    def costed(one: Trace) -> TrainingGraph:
        if not left_out:  # if the largest cannot be timed, none is: costs are fitted
            left_out.append(is_beyond(one.joint, one.graph, budget.most_bytes(one.graph)))
        return add_costs(one, progress=shown, profile=known, most_bytes=0 if left_out[0] else None)

    return costed


def _narrowed(traced: Trace, graph: RangedGraph, largest: Sizes) -> tuple[Trace, RangedGraph]:
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
