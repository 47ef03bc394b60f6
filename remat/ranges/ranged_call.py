"""`remat.rematerialize(dynamic=...)`: a module for a range of sizes in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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
from remat.graph_capture.distributed.dtensors import parameters_cast, refuse_floats_cast
from remat.graph_capture.distributed.sharded_step import over_ranks
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
from remat.ranks.collective_call import CollectiveCall
from remat.ranks.same_order import ONE_RANK, refuse_fake, require_group
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.schedules.derived import before_sharding
from remat.schedules.family import Family
from remat.solved import family_text
from remat.step_spec import StepSpec


class _Planned(msgspec.Struct, frozen=True):
    """What all ranks are given: schedules of one rank's step, and that step."""

    family: Family
    graph: RangedGraph


def rematerialize_over(spec: StepSpec, *, as_far_as_fits: bool = False) -> RangedModule:
    """A module that trains at all sizes of a range; `as_far_as_fits`: at as many as fit."""
    refuse_floats_cast(spec.args, spec.kwargs, spec.sharding)
    refuse_fake(spec.group)  # before ranks come together: a fake group has no others to wait for
    with (
        CollectiveCall(spec.group, "remat.rematerialize(dynamic=...)") as ranks,
        parameters_cast(spec.model, spec.sharding),
    ):
        return _planned_by_all(spec, ranks, as_far_as_fits=as_far_as_fits)


def _planned_by_all(spec: StepSpec, ranks: CollectiveCall, *, as_far_as_fits: bool) -> RangedModule:
    model, budget, dynamic = spec.model, spec.budget, spec.dynamic
    stages, name = stopwatch_of_call(verbose=spec.verbose), type(model).__name__
    known, batch = spec.known_profile, spec.batch
    with stages.stage("capture", f"tracing {name} over a range of sizes"):
        traced = trace(
            model,
            **spec.of_trace,
            dynamic=dynamic,
            float_inputs=spec.float_inputs,
            sharding=spec.sharding,
            gradient_release=release_of(spec),
        )
    require_group(traced.joint.module, None, ONE_RANK.format(what="a plan over a range of sizes"))
    asked = spec.of_solve
    sizes = sizes_within(traced, batch)
    of_ranks = ranks.gathered_texts("sizes", msgspec.json.encode(sizes).decode())
    largest_here = _largest_of([msgspec.json.decode(one) for one in of_ranks])

    def make() -> _Planned:
        with stages.stage("profile", "timing ops at several sizes") as shown:
            costed = costs_within(spec.parsed_budget, known, shown)
            whole = ranged_graph_of(traced, costed, workspaces_by(traced, known))
            graph = over_ranks(whole, spec.sharding, is_rewritten=True)
        with stages.stage("solve", f"solving for {budget} at the sizes of the range"):
            try:
                return _Planned(solve_over(graph, budget, **asked), graph)
            except TooLargeError as error:
                largest = error.largest
                if not as_far_as_fits or largest_here is None or not largest:
                    raise
                if any(size > largest[name] for name, size in largest_here.items()):
                    raise
                graph = _narrowed(graph, largest)
                # In bytes: a per cent of the narrower range would be less.
                return _Planned(solve_over(graph, error.budget_bytes, **asked), graph)

    ranks.require_same_step(traced.graph.hash)
    planned = ranks.from_first(make, _Planned)
    graph, family = planned.graph, _before_sharding(planned.family, traced)
    traced = _traced_within(traced, graph)
    first = None if sizes is None else family.number_at(**sizes)
    updates = updates_of(spec, traced)
    # With what a wrapper runs, it is not the graph that these schedules are of.
    own = graph if len(graph.base.ops) == len(traced.graph.ops) else None
    module = make_ranged(model, family, traced, own, first, updates, audit=of_steps(spec.audit))
    checked = None
    if sizes is not None:
        at_sizes, most_bytes = graph.at(**sizes), family.budget_bytes
        beside = Reference(at_sizes, most_bytes, gradients_there(model) if spec.accumulate else 0)
        if is_checked(at_sizes, spec.check, beside):
            # The check lets parameters be, and runs before they are sharded.
            is_bound = updates is None and spec.sharding.kind == "none"
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(
                    lambda: require_equal(
                        model, module, batch, most_bytes if is_bound else None, beside
                    ),
                    say_unchecked,
                )
    stages.say(family_text(family, checked, stages.elapsed_s, traced.graph.device))
    return module


def costs_within(
    budget: Budget, known: Profile | None, shown: ProgressCallback
) -> Callable[[Trace], TrainingGraph]:
    left_out: list[bool] = []

    def costed(one: Trace) -> TrainingGraph:
        if not left_out:  # if the largest cannot be timed, none is: costs are fitted
            left_out.append(is_beyond(one.joint, one.graph, budget.most_bytes(one.graph)))
        return add_costs(one, progress=shown, profile=known, most_bytes=0 if left_out[0] else None)

    return costed


def _narrowed(graph: RangedGraph, largest: Sizes) -> RangedGraph:
    symbols = tuple(msgspec.structs.replace(s, high=largest[s.name]) for s in graph.symbols)
    return msgspec.structs.replace(graph, symbols=symbols)


def _traced_within(traced: Trace, graph: RangedGraph) -> Trace:
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    recipe = dataclasses.replace(traced.recipe, signature=signature.within(graph.symbols))
    return dataclasses.replace(traced, recipe=recipe)


def _before_sharding(family: Family, traced: Trace) -> Family:
    """`family` of the step that a rank runs between what its wrapper does."""
    members = (
        msgspec.structs.replace(one, schedule=before_sharding(one.schedule, traced.graph))
        for one in family.members
    )
    return msgspec.structs.replace(family, members=tuple(members))


def _largest_of(ranks: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    """The largest sizes among the batches of all ranks; None if one is out of the range."""
    known = [one for one in ranks if one is not None]
    if len(known) < len(ranks):
        return None
    return {name: max(one[name] for one in known) for name in known[0]}


def sizes_within(traced: Trace, batch: Batch) -> dict[str, int] | None:
    """The sizes of a batch; None if they are out of the range that was traced."""
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    leaves = pytree.tree_leaves((batch.args, dict(batch.kwargs or {}), batch.target))
    try:
        return require_in_range(signature.symbols, signature.sizes_of(leaves))
    except SignatureError:
        return None
