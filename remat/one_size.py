"""A plan for a batch of one size: one rank traces and solves for all, and each compares it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from remat.graph_capture.distributed.collectives import collectives_in
from remat.graph_capture.distributed.dtensors import has_dtensors, parameters_cast
from remat.graph_capture.errors import RewriteError
from remat.ranks.collective_call import CollectiveCall
from remat.ranks.same_order import agree_on_audits, refuse_fake, require_group
from remat.rewriter.rewriting import rewrite
from remat.schedules.derived import before_sharding
from remat.solved import Solved, facts_of
from remat.step_planner import StepPlanner

if TYPE_CHECKING:
    from torch import fx

    from remat.step_spec import StepSpec


def plan_one_size(spec: StepSpec) -> fx.GraphModule:
    """The module that `remat.rematerialize` returns for a batch of one size."""
    refuse_fake(spec.group)
    if spec.compile:
        _refuse_compiled_dtensors(spec.model)
    # Each rank would choose by its own times; Inductor's code has no chunks.
    is_whole = spec.split is None and (spec.compile or spec.group is not None)
    with (
        CollectiveCall(spec.group, "remat.rematerialize") as ranks,
        parameters_cast(spec.model, spec.sharding),
    ):
        planner = StepPlanner(
            spec, sharding=spec.sharding, float_inputs=spec.float_inputs,
            split="none" if is_whole else spec.split,
        )  # fmt: skip
        traced = planner.traced
        require_group(traced.joint.module, spec.group)

        def make() -> Solved:
            found = planner.required(planner.found())
            if not spec.compile:  # its import takes Inductor's seconds
                return found
            from remat.compile.code_plans import with_fitting_code

            return with_fitting_code(traced, planner.found, found, spec.budget)

        ranks.require_same_step(traced.graph.hash)
        found = ranks.from_first(make, Solved)
        if spec.compile:
            from remat.compile.code_plans import compiled_module

            module, is_bound = compiled_module(
                spec.model, traced, found, spec.budget, audit=spec.audit
            )
        else:
            assert found.result.schedule is not None
            schedule = before_sharding(found.result.schedule, traced.graph)
            module = rewrite(
                spec.model, schedule, trace=traced, audit=spec.audit, **facts_of(found)
            )
            is_bound = spec.sharding.kind == "none"
        agree_on_audits(ranks, [module])
        # The profiler does not see what gloo's threads free, so it cannot hold such a step to it.
        is_bound = is_bound and not collectives_in(traced.joint.module)
        checked = planner.compared(
            module, found.graph, found.result.budget_bytes, is_bound=is_bound, ranks=ranks
        )
        planner.say_planned(found, checked)
    return module


def _refuse_compiled_dtensors(model: nn.Module) -> None:
    """Raise `RewriteError` for code by Inductor of a model whose parameters are DTensors."""
    if has_dtensors(model):
        raise RewriteError(
            f"{type(model).__name__} has parameters that are DTensors, whose plans run eager's "
            "ops: leave out compile=True"
        )
