"""Rewrites a model block by block, so that blocks can still be wrapped, as by `fully_shard`.

Ranks agree on a plan only where `group` is given: ranks of a pipeline must not wait for others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from torch import nn

from remat.analysis.levers import levers_text
from remat.blocks.block_planner import (
    BlockPlanner,
    BlocksAsked,
    BlocksPlan,
    TracedBlocks,
    trace_blocks,
)
from remat.blocks.chunked_head import head_of, with_loss_in_chunks
from remat.blocks.over_sizes import BlocksOver
from remat.blocks.updates import UpdatesOfBlocks, name_of
from remat.checks import (
    Batch,
    Reference,
    is_checked,
    reference_of,
    require_equal,
    unless_short,
)
from remat.graph_capture.capture_api import add_costs, chunks_by, workspaces_by
from remat.graph_capture.chunking.regions import requested_heads
from remat.graph_capture.costs.op_costs import with_measured_chunks
from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.distributed.collectives import collectives_in
from remat.graph_capture.distributed.dtensors import (
    parameters_cast,
    refuse_floats_cast,
    require_cast,
)
from remat.graph_capture.distributed.rank_refusals import refuse_range_over_ranks
from remat.graph_capture.errors import (
    BudgetError,
    CaptureError,
    RewriteError,
    SignatureError,
    option,
)
from remat.graph_capture.graph import Links, TrainingGraph
from remat.graph_capture.sizes.at_sizes import ranged_graph_of, trace_at
from remat.graph_capture.sizes.chunks_over_sizes import with_chunks
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.tracing.attribute_writes import state_guarded
from remat.graph_capture.tracing.fake_tensors import has_storage
from remat.graph_capture.tracing.trace import trace_recipe
from remat.levers.chunks_at_need import is_enough
from remat.levers.optimizer_in_backward import require_updates_in_backward
from remat.progress import stopwatch_of_call
from remat.ranges.ranged_call import costs_within, sizes_within
from remat.ranks.collective_call import CollectiveCall
from remat.ranks.same_order import agree_on_audits, refuse_fake, require_group
from remat.rewriter.checking.audit import Audits
from remat.rewriter.compiled import CompiledStep, compile_step
from remat.rewriter.guards.forward import constants_of
from remat.rewriter.tiers.file_tier import FileTier
from remat.rewriter.user_module.module import RematModule, SharedState, make_module, tell_wrapper
from remat.rewriter.user_module.own_forward import Unplanned, with_replaced
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.schedules.derived import fastest_us, in_chunks, unchunked
from remat.schedules.family import Family
from remat.schedules.outcome import Check, Result
from remat.schedules.schedule import ChunkedRegion, Schedule
from remat.solved import Solved, family_text, infeasible_text, planned_text
from remat.step_spec import StepSpec

_plans: weakref.WeakKeyDictionary[nn.Module, BlocksPlan] = weakref.WeakKeyDictionary()


def blocks_planned(spec: StepSpec) -> nn.Module:
    """What `remat.rematerialize` returns where `blocks` is given; its docstring has the errors."""
    refuse_fake(spec.group)  # before ranks come together: a fake group has no others to wait for
    spec = _with_state(spec)
    model, budget, sharding = spec.model, spec.budget, spec.sharding
    pattern, batch = spec.blocks or "", spec.batch
    stages, name = stopwatch_of_call(verbose=spec.verbose), type(model).__name__
    ranks_together = CollectiveCall(spec.group, "remat.rematerialize(blocks=...)")
    with ranks_together as ranks, parameters_cast(model, sharding):
        _refuse(model)
        known, tiers = spec.known_profile, spec.tiers
        with stages.stage("capture", f"tracing {name} and its blocks"):
            traced = trace_blocks(
                model, pattern, **spec.of_trace, sharding=sharding, gradient_release=False,
                dynamic=spec.dynamic, split=spec.split or "none", float_inputs=spec.float_inputs,
            )  # fmt: skip
        whole = traced.whole
        if spec.dynamic:
            refuse_floats_cast(spec.args, spec.kwargs, sharding)
            refuse_range_over_ranks(whole.joint.module)
        require_group(whole.joint.module, spec.group)
        for one in traced.distinct:
            require_cast(next(iter(one.at)), one.trace.recipe.signature.dtypes, sharding)

        def make_over() -> BlocksPlan:
            with stages.stage("profile", "timing ops at several sizes") as shown:
                costed = costs_within(spec.parsed_budget, known, tiers, shown)
                ranged = ranged_graph_of(whole, costed, workspaces_by(whole, known))
                if whole.recipe.split != "none":
                    ranged = with_chunks(whole, ranged, chunks_by(shown))
            with stages.stage("solve", f"solving for {budget} at the sizes of the range"):
                return _fastest_over(spec, traced, ranged)

        def make() -> BlocksPlan:
            if spec.dynamic:
                return make_over()
            most_bytes = spec.parsed_budget.most_bytes(whole.graph)
            facts: dict[str, Any] = {"profile": known, "tiers": tiers, "most_bytes": most_bytes}
            with stages.stage("profile", "timing ops") as shown:
                costed = unchunked(add_costs(whole, progress=shown, chunks=False, **facts))
            planner = BlockPlanner(traced, costed, _asked(spec))
            budget_bytes = _budget_bytes(spec, planner.eager)
            with stages.stage("solve", f"solving for {budget}"):
                best = _plan_within(planner, budget_bytes)
            is_met = budget_bytes is not None and is_enough(best.result)
            if is_met or whole.recipe.split == "none":
                return _with_head(spec, traced, costed, best, budget_bytes)  # has none in chunks
            with stages.stage("profile", "timing the head in chunks") as shown:
                costed = with_measured_chunks(whole, costed, shown, found=requested_heads(whole))
            with stages.stage("solve", f"solving for {budget}"):
                return _with_head(spec, traced, costed, best, budget_bytes)

        # Others would decode a plan of ops they lack.
        ranks.require_same_step(f"{traced.whole.graph.hash} {' '.join(traced.blocks)}")
        plan = ranks.from_first(make, BlocksPlan)  # ranks time ops apart: their plans would differ
        made = _rewritten(model, traced, plan, "block" if spec.audit else "none")
        agree_on_audits(ranks, made.modules())
        # The check runs before the user shards the model, so its peak is not that of the plan.
        is_alone = sharding.kind == "none" and not collectives_in(whole.joint.module)
        is_bound = is_alone and spec.optimizer_in_backward is None  # it lets parameters be
        budget_bytes = plan.result.budget_bytes
        sizes = sizes_within(whole, batch) if spec.dynamic else {}
        graph = trace_at(whole, sizes).graph if sizes else whole.graph
        beside = reference_of(graph, budget_bytes, model, batch)
        checked = None
        # A check runs the model's collectives: all ranks run it, or none.
        is_run = sizes is not None and is_checked(graph, spec.check, beside)
        if ranks.all_agree("check", is_run):
            limits = budget_bytes if is_bound else None, beside
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(lambda: _require_equal_blocks(model, made, batch, *limits))
        said = Solved(msgspec.structs.replace(whole.graph, links=plan.links), plan.result)
        what = f"{whole.recipe.title}, {len(plan.schedules)} blocks"
        if plan.family is None:
            levers = levers_text(said.graph, plan.result.schedule)
            stages.say(planned_text(what, said, checked, stages.elapsed_s, levers))
        else:
            stages.say(family_text(plan.family, checked, stages.elapsed_s, whole.graph.device))
    _plans[made] = plan
    tell_wrapper(made, sharding, accumulates=spec.accumulate, paths=[*plan.schedules])
    if spec.optimizer_in_backward is not None:
        UpdatesOfBlocks(model, made, spec.optimizer_in_backward)
    return made


def _with_state(spec: StepSpec) -> StepSpec:
    """`spec`, with the state of an optimizer that updates in backward."""
    if spec.outputs is not None and not spec.asked["split"]:
        raise CaptureError(
            f"add {option('split', 'exact')}, which makes no logits, or leave out outputs: what "
            "lies outside the blocks returns what it does in the model"
        )
    if (optimizer := spec.optimizer_in_backward) is None:
        return spec
    require_updates_in_backward(spec)
    if spec.accumulate:
        raise CaptureError(
            "leave out accumulate, and sum over batches with set_requires_gradient_sync(False) of "
            "fully_shard: blocks whose parameters are updated in backward hold no gradients"
        )
    return spec.replace(optimizer=name_of(optimizer))


def _asked(spec: StepSpec) -> BlocksAsked:
    return BlocksAsked(
        spec.sharding, spec.time_limit_s, spec.optimizer_in_backward is not None,
        spec.keep, spec.recompute,
    )  # fmt: skip


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


def _plan_within(planner: BlockPlanner, budget_bytes: int | None) -> BlocksPlan:
    """`budget_bytes`: None for the least."""
    return planner.plan(planner.least_bytes() if budget_bytes is None else budget_bytes)


def _budget_bytes(spec: StepSpec, eager: TrainingGraph) -> int | None:
    budget = spec.parsed_budget
    return None if budget.kind == "min" else budget.bytes_for(eager)


def _fastest(
    best: BlocksPlan, choices: Iterable[ChunkedRegion],
    plan_in: Callable[[ChunkedRegion, Result], BlocksPlan | None], *, is_least: bool,
) -> BlocksPlan:  # fmt: skip
    """`best`, or a plan with the head and its loss in chunks; None: one that cannot win."""
    for chosen in choices:
        if (plan := plan_in(chosen, best.result)) is not None:
            best = min(best, plan, key=lambda one: _rank(one.result, is_least=is_least))
    if best.result.schedule is None:
        raise BudgetError(infeasible_text(best.result))
    return best


def _fastest_over(spec: StepSpec, traced: TracedBlocks, ranged: RangedGraph) -> BlocksPlan:
    """Over a range, the plan that is the fastest at the largest sizes."""
    over = BlocksOver(traced, ranged, _asked(spec))
    budget_bytes = _budget_bytes(spec, over.largest().eager)
    within = partial(_plan_within, budget_bytes=budget_bytes)

    def plan_in(chosen: ChunkedRegion, best: Result) -> BlocksPlan | None:
        if budget_bytes is not None and is_enough(best):
            return None
        head = head_of(ranged.top, chosen, spec.model)
        return msgspec.structs.replace(over.with_head(chosen).plan(within), head=head)

    choices = (ChunkedRegion(one.region, one.chunks, one.exact) for one in ranged.choices)
    return _fastest(over.plan(within), choices, plan_in, is_least=budget_bytes is None)


def _with_head(
    spec: StepSpec, traced: TracedBlocks, costed: TrainingGraph, whole: BlocksPlan,
    budget_bytes: int | None,
) -> BlocksPlan:  # fmt: skip
    def plan_in(chosen: ChunkedRegion, best: Result) -> BlocksPlan | None:
        graph = in_chunks(costed, (chosen,))
        if budget_bytes is not None and best.schedule and graph.time_us >= best.time_us:
            return None  # its ops alone take no less
        plan = _plan_within(BlockPlanner(traced, graph, _asked(spec)), budget_bytes)
        head, result = head_of(costed, chosen, spec.model), _bounded(plan.result, costed)
        return msgspec.structs.replace(plan, head=head, result=result)

    choices = (
        ChunkedRegion(region.name, choice.chunks, choice.exact)
        for region in costed.regions
        for choice in region.choices
    )
    return _fastest(whole, choices, plan_in, is_least=budget_bytes is None)


def _bounded(result: Result, graph: TrainingGraph) -> Result:
    bound_us = min(result.lower_bound_us, fastest_us(graph))  # other numbers of chunks count too
    is_proved = result.schedule is not None and result.time_us <= bound_us * (1 + 1e-9)
    status = "feasible" if result.status == "optimal" and not is_proved else result.status
    return msgspec.structs.replace(result, lower_bound_us=bound_us, status=status)


def _rank(result: Result, *, is_least: bool) -> tuple[bool, float]:
    """Those that fit come first, by time, or by peak; others by the least that would."""
    if result.schedule is None:
        return True, result.least_feasible_bytes
    return False, result.peak_bytes if is_least else result.time_us


def _rewritten(
    model: nn.Module, traced: TracedBlocks, plan: BlocksPlan, audit: Audits
) -> nn.Module:
    links = plan.links  # before its first step each block says if its room is short
    if links is not None and plan.host_bytes and not is_cuda(traced.whole.graph.device):
        FileTier(plan.host_bytes, plan.nvme_bytes, links.nvme_path).require_room()
    rewritten = _Rewritten(traced, links, audit, Unplanned(type(model).__name__))
    replaced: dict[nn.Module, nn.Module] = {}
    for path, schedule in plan.schedules.items():
        block, family = traced.blocks[path], plan.family
        if family is None:
            replaced[block] = rewritten.block(path, schedule)
        else:
            replaced[block] = rewritten.over(path, [one[path] for one in plan.members], family)
    if plan.head is not None:
        for path in plan.head.paths:
            head = model.get_submodule(path)
            replaced[head] = with_loss_in_chunks(head, path, plan.head)
    return with_replaced(model, replaced)


class _Rewritten:
    """Blocks that follow schedules; equal blocks of one schedule share a compiled step."""

    def __init__(
        self, traced: TracedBlocks, links: Links | None, audit: Audits, told: Unplanned
    ) -> None:
        self.traced, self.links = traced, links
        self.audit: Audits = audit
        self.told = told  # once for all blocks
        self.compiled: dict[tuple[int, Any], CompiledStep] = {}

    def block(self, path: str, schedule: Schedule) -> RematModule:
        one, block = self.traced.of_path[path], self.traced.blocks[path]
        recipe = one.trace.recipe
        key = (id(one), schedule.steps)
        step = self.compiled.get(key)
        # A step that holds objects of one block is of use to no other.
        is_own = step and (step.initialised or step.floats)
        if step is None or is_own or constants_of(step.forward, step.backward):
            fresh = trace_recipe(block, recipe)  # compiling uses up a trace's metadata
            step, state = compile_step(fresh, schedule, links=self.links), fresh.python_state
            self.compiled[key] = step
        else:
            traced_as = one.trace.python_state
            # The shared step was traced on another block: guards read this one's own Python state.
            state = state_guarded(block, recipe.loss_fn, step.mutated, traced_as)
        made = make_module(block, schedule, recipe, step, state, audit=self.audit)
        made.__setstate__(self.told)
        return made

    def over(self, path: str, schedules: Sequence[Schedule], family: Family) -> RangedModule:
        """A block whose batch's sizes pick, as in all other blocks, the schedule that runs."""
        block, one = self.traced.blocks[path], self.traced.of_path[path].trace
        members = tuple(
            msgspec.structs.replace(member, schedule=schedule)
            for member, schedule in zip(family.members, schedules, strict=True)
        )
        own = msgspec.structs.replace(
            family, model=type(block).__name__, members=members, traced_hash=one.graph.hash
        )
        # Now, as the parameters of a later step are parts of what was traced.
        each = [self.block(path, schedule) for schedule in schedules]
        made = make_ranged(block, own, one, audit=self.audit, made=each)
        made.__setstate__(self.told)
        return made
