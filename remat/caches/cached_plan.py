"""The plan that a cache makes for a batch: at hand, kept on disk, or solved for, in this order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.caches.known_plans import AtHand, KnownPlans, adopted, keep_solve, kept_solve
from remat.ranks.same_order import require_group
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.solved import at_hand_text, facts_of
from remat.step_planner import StepPlanner

if TYPE_CHECKING:
    from remat.step_spec import StepSpec


def cached_plan(spec: StepSpec, known: KnownPlans) -> RematModule:
    """The module for a batch, as `remat.rematerialize` makes it; what it solves for is kept."""
    planner = StepPlanner(spec, float_inputs=spec.float_inputs, split=spec.split)
    require_group(planner.traced.joint.module, None)
    found = known.at_hand(planner.traced, spec.parsed_budget, may_keep_all=spec.may_keep_all)
    if found is not None:
        return _module_at_hand(planner, found, known)
    return _solved(planner, known)


def _module_at_hand(planner: StepPlanner, found: AtHand, known: KnownPlans) -> RematModule:
    spec, traced = planner.spec, planner.traced
    # Once a model, a whole step is compared with eager's; later plans by their first outputs.
    is_compared = known.is_checked and spec.check is not False
    module = adopted(
        spec.model, traced, found.schedule, found.links, audit=spec.audit, is_compared=is_compared
    )
    checked = None
    if not known.is_checked:
        checked = planner.compared(module, found.graph, found.schedule.budget_bytes)
    known.took(found.peak_bytes)
    known.is_checked = True
    said = at_hand_text(
        traced.recipe.title, found.schedule, found.peak_bytes, checked,
        planner.stages.elapsed_s, is_compared=is_compared,
    )  # fmt: skip
    planner.stages.say(said)
    return module


def _solved(planner: StepPlanner, known: KnownPlans) -> RematModule:
    spec, traced = planner.spec, planner.traced
    graph = planner.costed(traced, chunks=not planner.may_wait())
    # Sorted, as the order in which options were given asks nothing else.
    text = repr(sorted(spec.of_solve.items()))
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
        module = rewrite(
            spec.model, result.schedule, trace=traced, audit=spec.audit, **facts_of(found)
        )
        checked = planner.compared(module, found.graph, result.budget_bytes)
        keep_solve(graph, spec.parsed_budget, text, result)
    known.note(found)
    known.is_checked = True
    planner.say_planned(found, checked, is_compared=is_compared)
    return module
