"""`remat.rematerialize(dynamic=...)`: a module for a range of sizes in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsIndex

import msgspec

from remat.analysis.levers import levers_text
from remat.budgets import Budget, parse_budget
from remat.checks import Batch, is_checked, reference_of, require_equal, unless_short
from remat.graph_capture.capture_api import add_costs, chunks_by, workspaces_by
from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.costs.op_times import ProgressCallback
from remat.graph_capture.costs.step_time import is_beyond
from remat.graph_capture.devices.memory import LowerTiers
from remat.graph_capture.distributed.dtensors import parameters_cast, refuse_floats_cast
from remat.graph_capture.distributed.sharded_step import over_ranks
from remat.graph_capture.errors import SignatureError, TooLargeError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.at_sizes import ranged_graph_of
from remat.graph_capture.sizes.chunks_over_sizes import with_chunks
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import Sizes, require_in_range
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.trace import trace
from remat.graph_capture.tracing.traced_step import Trace
from remat.levers.chunks_at_need import is_enough, may_wait
from remat.levers.optimizer_in_backward import release_of, updates_of
from remat.progress import Stopwatch, stopwatch_of_call
from remat.ranges.curve import solve_over, solve_top
from remat.ranks.collective_call import CollectiveCall
from remat.ranks.same_order import ONE_RANK, refuse_fake, require_group
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.rewriting import code_by_size
from remat.rewriter.user_module.module import tell_wrapper
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.schedules.derived import before_sharding
from remat.schedules.family import Family, resized_schedule
from remat.schedules.outcome import Result
from remat.solved import family_text
from remat.step_spec import StepSpec


class _Planned(msgspec.Struct, frozen=True):
    """What all ranks are given: schedules of a rank's step, that step, and without its wrapper."""

    family: Family
    graph: RangedGraph
    own: RangedGraph


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
    known, tiers, batch = spec.known_profile, spec.tiers, spec.batch  # refused before the trace
    is_whole = spec.split is None and (spec.compile or spec.group is not None)
    with stages.stage("capture", f"tracing {name} over a range of sizes"):
        traced = trace(
            model,
            **spec.of_trace,
            dynamic=dynamic,
            float_inputs=spec.float_inputs,
            split="none" if is_whole else spec.split,
            sharding=spec.sharding,
            gradient_release=release_of(spec),
        )
    require_group(traced.joint.module, None, ONE_RANK.format(what="a plan over a range of sizes"))
    asked = spec.of_solve
    sizes = sizes_within(traced, batch)
    of_ranks = ranks.gathered_texts("sizes", msgspec.json.encode(sizes).decode())
    largest_here = _largest_of([msgspec.json.decode(one) for one in of_ranks])

    over = partial(over_ranks, sharding=spec.sharding, is_rewritten=True)

    def make() -> _Planned:
        with stages.stage("profile", "timing ops at several sizes") as shown:
            costed = costs_within(spec.parsed_budget, known, tiers, shown)
            whole = ranged_graph_of(traced, costed, workspaces_by(traced, known))
        whole, top = chunked_at_need(traced, whole, over, budget, stages, **asked)
        with stages.stage("solve", f"solving for {budget} at the sizes of the range"):
            graph = over(whole)
            try:
                return _Planned(_family_over(spec, traced, graph, budget, top), graph, whole)
            except TooLargeError as error:
                largest = error.largest
                if not as_far_as_fits or largest_here is None or not largest:
                    raise
                if any(size > largest[name] for name, size in largest_here.items()):
                    raise
                graph, whole = _narrowed(graph, largest), _narrowed(whole, largest)
                # In bytes: a per cent of the narrower range would be less.
                family = _family_over(spec, traced, graph, error.budget_bytes)
                return _Planned(family, graph, whole)

    ranks.require_same_step(traced.graph.hash)
    planned = ranks.from_first(make, _Planned)
    graph, family = planned.graph, _before_sharding(planned)
    traced = _traced_within(traced, graph)
    first = None if sizes is None else family.number_at(**sizes)
    updates = updates_of(spec, traced)
    how: Any = {"audit": of_steps(spec.audit), "code": code_by_size(spec.compile)}
    module = make_ranged(model, family, traced, planned.own, first, updates, **how)
    checked = None
    if sizes is not None:
        at_sizes, most_bytes = graph.at(**sizes), family.budget_bytes
        beside = reference_of(at_sizes, most_bytes, model, batch)
        if is_checked(at_sizes, spec.check, beside):
            # The check lets parameters be, and runs before they are sharded.
            is_bound = updates is None and spec.sharding.kind == "none"
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(
                    lambda: require_equal(
                        model, module, batch, most_bytes if is_bound else None, beside
                    )
                )
    largest = planned.own.top
    levers = levers_text(largest, resized_schedule(family.top.schedule, largest))
    also = {"inputs": traced.recipe.inputs_text, "levers": levers}
    said = family_text(family, checked, stages.elapsed_s, largest.device, **also)
    stages.say(f"{said}{_COMPILED if spec.compile else ''}")
    tell_wrapper(module, spec.sharding, accumulates=spec.accumulate)
    return module


_COMPILED = "; Inductor compiles each size that comes, and keeps 16"


def _family_over(
    spec: StepSpec, traced: Trace, graph: RangedGraph, budget: str | SupportsIndex,
    top: Result | None = None,
) -> Family:  # fmt: skip
    """The family for a budget; of one that is compiled, its code at the largest sizes fits too."""
    if not spec.compile:
        return solve_over(graph, budget, top=top, **spec.of_solve)
    from remat.compile.code_plans import family_with_fitting_code

    def solve(budget: str | SupportsIndex) -> Family:
        return solve_over(graph, budget, **spec.of_solve)

    return family_with_fitting_code(spec.model, traced, solve, budget)


def chunked_at_need(
    traced: Trace, graph: RangedGraph, over: Callable[[RangedGraph], RangedGraph],
    budget: str | SupportsIndex, stages: Stopwatch, **asked: Any,
) -> tuple[RangedGraph, Result | None]:  # fmt: skip
    """The graph, with heads in chunks where they are asked for or may help, and the outcome at its
    largest sizes where that is known. `over`: to the step of a rank; `asked` as of `solve_over`."""
    top: Result | None = None
    if traced.recipe.split == "none":
        return graph, top
    if may_wait(traced, parse_budget(budget)):
        with stages.stage("solve", f"solving for {budget} at the largest sizes"):
            top = solve_top(over(graph), budget, **asked)
        if is_enough(top):
            return graph, top
    with stages.stage("profile", "timing large layers in chunks at several sizes") as shown:
        chunked = with_chunks(traced, graph, chunks_by(shown))
    if not chunked.choices:
        return graph, top
    known: dict[str, Any] = {} if top is None else {"at_hand": top}
    with stages.stage("solve", f"solving for {budget} in chunks"):
        return chunked, solve_top(over(chunked), budget, **asked, **known)


def costs_within(
    budget: Budget, known: Profile | None, tiers: LowerTiers | None, shown: ProgressCallback
) -> Callable[[Trace], TrainingGraph]:
    left_out: list[bool] = []

    def costed(one: Trace) -> TrainingGraph:
        if not left_out:  # if the largest cannot be timed, none is: costs are fitted
            left_out.append(is_beyond(one.joint, one.graph, budget.most_bytes(one.graph)))
        most_bytes = 0 if left_out[0] else None
        return add_costs(one, progress=shown, profile=known, tiers=tiers, most_bytes=most_bytes)

    return costed


def _narrowed(graph: RangedGraph, largest: Sizes) -> RangedGraph:
    symbols = tuple(msgspec.structs.replace(s, high=largest[s.name]) for s in graph.symbols)
    return msgspec.structs.replace(graph, symbols=symbols)


def _traced_within(traced: Trace, graph: RangedGraph) -> Trace:
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    recipe = dataclasses.replace(traced.recipe, signature=signature.within(graph.symbols))
    return dataclasses.replace(traced, recipe=recipe)


def _before_sharding(planned: _Planned) -> Family:
    """The schedules of the step that a rank runs between what its wrapper does."""
    sharded, own = planned.graph.top, planned.own.top
    members = (
        msgspec.structs.replace(one, schedule=before_sharding(one.schedule, sharded, own))
        for one in planned.family.members
    )
    return msgspec.structs.replace(planned.family, members=tuple(members))


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
