"""Plans for a range of sizes: made of a module, and rewritten to."""

from __future__ import annotations

import dataclasses

import msgspec
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses import FakeTensorMode

from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.errors import CaptureError, PlanError
from remat.graph_capture.shapes.at_sizes import ranged_graph_of
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.graph_capture.shapes.ranges import Place, as_symbol
from remat.graph_capture.shapes.signature import RangedSignature
from remat.graph_capture.tracing.recipe import Recipe, keep_recipe
from remat.graph_capture.tracing.step_module import LossFunction
from remat.graph_capture.tracing.trace import trace_recipe
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.plans.facts import recipe_from, signature_from, under_autocast
from remat.rewriter.plans.making import make_plan
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.schedules.family import Family
from remat.schedules.judged_plan import judge_family
from remat.schedules.over_range import carried
from remat.schedules.plan import Plan, RangeFacts


def plan_over_range(kind: type[RangedModule]) -> Plan:
    """The plan of a module for a range of sizes.

    Raises
    ------
    PlanError : the prices of its graph are not at hand; or its batch holds what a file cannot.
    """
    members, family, graph = kind._remat_members, kind._remat_family, kind._remat_graph
    if graph is None:
        raise PlanError(
            f"the graph behind this plan of {family.model} is not at hand: rewrite with it, "
            "remat.rewrite(model, family, over=graph)"
        )
    recipe = members.first._remat_guards.recipe
    places = members.signature.places
    return plan_of_family(kind._remat_original_module, recipe, places, family, graph)


def plan_of_family(
    model: nn.Module, recipe: Recipe, places: tuple[Place, ...], family: Family, graph: RangedGraph
) -> Plan:
    """The plan of a family for a model as it was traced, with the graph that it was made for."""
    top = graph.bounding(graph.symbols)
    schedule = carried(family.top.schedule, top)
    plan = make_plan(model, recipe, schedule, None, top)
    return msgspec.structs.replace(plan, over=RangeFacts(places, family, graph))


def load_over_range(
    plan: Plan, over: RangeFacts, model: nn.Module, loss_fn: LossFunction | None, *,
    audit: bool = True,
) -> RangedModule:  # fmt: skip
    """Rewrite `model` to a kept plan for a range, which fits it. Nothing is measured or solved.

    Raises
    ------
    PlanError : the plan was edited; or the model has other values, or values of other sizes.
    """
    judge_family(over)
    with under_autocast(plan.autocast):
        recipe = recipe_from(plan, loss_fn, resolved_device(None, model))
        traced = trace_recipe(model, dataclasses.replace(recipe, signature=_ranged(plan, over)))
        found = ranged_graph_of(traced, lambda one: one.graph)
    known = over.graph
    if (found.extents, found.batch_bytes) != (known.extents, known.batch_bytes):
        raise PlanError(
            f"the plan does not fit: values of {plan.model} have other sizes than those that it "
            "was made for. Make it again with remat.rematerialize(..., dynamic=...)"
        )
    keep_recipe(model, over.family.traced_hash, traced.recipe)
    return make_ranged(model, over.family, traced, over.graph, audit=of_steps(audit))


def _ranged(plan: Plan, over: RangeFacts) -> RangedSignature:
    """The signature of the batches of a kept range.

    Raises
    ------
    PlanError : the places in the file are not those of its batch.
    """
    plain = signature_from(plan.batch)
    batch = plain.example(FakeTensorMode())
    leaves = pytree.tree_leaves(batch)
    try:
        symbols = tuple(
            as_symbol((s.name, s.low, s.high, s.multiple), "the range", 0)
            for s in over.family.symbols
        )
        sizes = {one.symbol: leaves[one.leaf].shape[one.dim] for one in over.places}
        hints = {symbol.name: sizes[symbol.name] for symbol in symbols}
        return RangedSignature(batch, symbols, over.places, hints)
    except (IndexError, AttributeError, KeyError, CaptureError) as error:
        raise PlanError(f"the range in the plan file cannot be read ({error})") from error
