"""Rewrites a model block by block, so that blocks can still be wrapped, as by `fully_shard`.

Ranks agree on a plan only where `group` is given: ranks of a pipeline must not wait for others.
"""

from __future__ import annotations

import weakref
from typing import Any, SupportsIndex

from torch import nn

from remat.analysis.levers import levers_text
from remat.blocks.block_planner import BlockPlanner, BlocksPlan, TracedBlocks, trace_blocks
from remat.budgets import parse_budget
from remat.checks import (
    Batch,
    Reference,
    gradients_there,
    is_checked,
    require_equal,
    say_unchecked,
    unless_short,
)
from remat.graph_capture.capture_api import add_costs
from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.distributed.collectives import collectives_in
from remat.graph_capture.distributed.dtensors import parameters_cast, require_cast
from remat.graph_capture.errors import BudgetError, CaptureError, RewriteError, SignatureError
from remat.graph_capture.tracing.attribute_writes import state_guarded
from remat.graph_capture.tracing.fake_tensors import has_storage
from remat.graph_capture.tracing.trace import trace_recipe
from remat.progress import stopwatch_of_call
from remat.ranks.collective_call import CollectiveCall
from remat.ranks.same_order import agree_on_audits, refuse_fake, require_group
from remat.rewriter.checking.audit import Audits
from remat.rewriter.compiled import CompiledStep, compile_step
from remat.rewriter.guards.forward import constants_of
from remat.rewriter.tiers.file_tier import FileTier
from remat.rewriter.user_module.module import SharedState, make_module
from remat.rewriter.user_module.own_forward import Unplanned, with_replaced
from remat.schedules.outcome import Check
from remat.solved import Solved, infeasible_text, planned_text
from remat.step_spec import StepSpec

_plans: weakref.WeakKeyDictionary[nn.Module, BlocksPlan] = weakref.WeakKeyDictionary()


def blocks_planned(spec: StepSpec) -> nn.Module:
    """What `remat.rematerialize` returns where `blocks` is given; its docstring has the errors."""
    refuse_fake(spec.group)  # before ranks come together: a fake group has no others to wait for
    model, budget, sharding = spec.model, spec.budget, spec.sharding
    pattern, batch = spec.blocks or "", spec.batch
    stages, name = stopwatch_of_call(verbose=spec.verbose), type(model).__name__
    ranks_together = CollectiveCall(spec.group, "remat.rematerialize(blocks=...)")
    with ranks_together as ranks, parameters_cast(model, sharding):
        _refuse(model)
        known, tiers = spec.known_profile, spec.tiers
        with stages.stage("capture", f"tracing {name} and its blocks"):
            traced = trace_blocks(
                model, pattern, **spec.of_trace, sharding=sharding, gradient_release=False
            )  # fmt: skip
        require_group(traced.whole.joint.module, spec.group)
        for one in traced.distinct:
            require_cast(next(iter(one.at)), one.trace.recipe.signature.dtypes, sharding)

        def make() -> BlocksPlan:
            most_bytes = spec.parsed_budget.most_bytes(traced.whole.graph)
            facts: dict[str, Any] = {"profile": known, "tiers": tiers, "most_bytes": most_bytes}
            with stages.stage("profile", "timing ops") as shown:
                costed = add_costs(traced.whole, progress=shown, **facts)
            with stages.stage("solve", f"solving for {budget}"):
                planner = BlockPlanner(traced, costed, sharding, spec.time_limit_s)
                return _plan_within(planner, budget)

        # Others would decode a plan of ops they lack.
        ranks.require_same_step(f"{traced.whole.graph.hash} {' '.join(traced.blocks)}")
        plan = ranks.from_first(make, BlocksPlan)  # ranks time ops apart: their plans would differ
        made = _rewritten(model, traced, plan, "block" if spec.audit else "none")
        agree_on_audits(ranks, made.modules())
        # The check runs before the user shards the model, so its peak is not that of the plan.
        is_bound = sharding.kind == "none" and not collectives_in(traced.whole.joint.module)
        budget_bytes = plan.result.budget_bytes
        beside_bytes = gradients_there(model) if spec.accumulate else 0
        beside = Reference(traced.whole.graph, budget_bytes, beside_bytes)
        checked = None
        # A check runs the model's collectives: all ranks run it, or none.
        if ranks.all_agree("check", is_checked(traced.whole.graph, spec.check, beside)):
            limits = budget_bytes if is_bound else None, beside
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(
                    lambda: _require_equal_blocks(model, made, batch, *limits), say_unchecked
                )
        what = f"{traced.whole.recipe.title}, {len(plan.schedules)} blocks"
        found = Solved(traced.whole.graph, plan.result)
        levers = levers_text(found.graph, plan.result.schedule)
        stages.say(planned_text(what, found, checked, stages.elapsed_s, levers))
    _plans[made] = plan
    return made


def _require_equal_blocks(
    model: nn.Module, made: nn.Module, batch: Batch, limit_bytes: int | None, beside: Reference
) -> Check:
    try:
        return require_equal(model, made, batch, limit_bytes, beside)
    except SignatureError as error:
        raise CaptureError(
            "pass what differs, such as an attention mask of four dimensions, as an argument of "
            f"the model: a block is called differently in eager than when traced ({error}), as by "
            "code that checks whether it is traced"
        ) from error


def planned_blocks(model: nn.Module) -> BlocksPlan | None:
    """The plan that a model of blocks that were planned one by one follows; None if none does."""
    return _plans.get(model)


def _refuse(model: nn.Module) -> None:
    if any(isinstance(module, SharedState) for module in model.modules()):
        raise RewriteError(
            "plan the blocks of the original model: a part of this one already follows a plan"
        )
    if not has_storage(model):
        raise RewriteError(
            f"build the model with storage: this {type(model).__name__} is on the meta device and "
            "cannot train.\n"
            "Or plan it for another device with remat.capture(..., device=...)"
        )


def _plan_within(planner: BlockPlanner, budget: str | SupportsIndex) -> BlocksPlan:
    if parse_budget(budget).kind == "min":
        return planner.plan(planner.least_bytes())
    plan = planner.plan(parse_budget(budget).bytes_for(planner.eager))
    if plan.result.schedule is None:
        raise BudgetError(infeasible_text(plan.result))
    return plan


def _rewritten(
    model: nn.Module, traced: TracedBlocks, plan: BlocksPlan, audit: Audits
) -> nn.Module:
    links = plan.links  # before its first step each block says if its room is short
    if links is not None and plan.host_bytes and not is_cuda(traced.whole.graph.device):
        FileTier(plan.host_bytes, plan.nvme_bytes, links.nvme_path).require_room()
    compiled: dict[tuple[int, Any], CompiledStep] = {}  # equal blocks of one schedule share a step
    replaced: dict[nn.Module, nn.Module] = {}
    told = Unplanned(type(model).__name__)  # once for all blocks
    for path, schedule in plan.schedules.items():
        one, block = traced.of_path[path], traced.blocks[path]
        recipe = one.trace.recipe
        key = (id(one), schedule.steps)
        step = compiled.get(key)
        # A step that holds objects of one block is of use to no other.
        if step is None or step.initialised or constants_of(step.forward, step.backward):
            fresh = trace_recipe(block, recipe)  # compiling uses up a trace's metadata
            step, state = compile_step(fresh, schedule, links=plan.links), fresh.python_state
            compiled[key] = step
        else:
            traced_as = one.trace.python_state
            # The shared step was traced on another block: guards read this one's own Python state.
            state = state_guarded(block, recipe.loss_fn, step.mutated, traced_as)
        made = make_module(block, schedule, recipe, step, state, audit=audit)
        made.__setstate__(told)
        replaced[block] = made
    return with_replaced(model, replaced)
