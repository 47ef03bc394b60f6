"""From a step to a plan that has been compared with eager: each stage once, for every entry."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec
from torch import fx, nn

from remat.analysis.levers import levers_text
from remat.analysis.plan_figures import compiled_text
from remat.budgets import Budget, budget_again
from remat.checks import is_checked, reference_of, require_equal, unless_short
from remat.graph_capture.capture_api import add_costs
from remat.graph_capture.costs.op_costs import with_measured_chunks
from remat.graph_capture.distributed.collectives import collectives_in
from remat.graph_capture.distributed.dtensors import has_dtensors, parameters_cast
from remat.graph_capture.distributed.sharded_step import local_step
from remat.graph_capture.errors import BudgetError, CaptureError, RewriteError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.option_pairs import not_taken_with
from remat.graph_capture.tracing.trace import trace
from remat.graph_capture.tracing.traced_step import Trace
from remat.levers.chunks_at_need import may_wait, naming_tolerance, solved_at_need
from remat.levers.optimizer_in_backward import release_of, updates_of
from remat.progress import solver_shown, stopwatch_of_call
from remat.ranks.collective_call import CollectiveCall
from remat.ranks.same_order import agree_on_audits, refuse_fake, require_group
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import tell_wrapper
from remat.schedules.derived import before_sharding
from remat.schedules.outcome import Check, Result
from remat.solved import Solved, facts_of, infeasible_text, planned_text
from remat.step_spec import StepSpec

if TYPE_CHECKING:
    from remat.compile.code_plans import TracesOfPlans

_NOT_COMPILED = {"compile", "group", *not_taken_with("compile")}


class StepPlanner:
    def __init__(self, spec: StepSpec, **of_trace: Any) -> None:
        self.spec = spec
        self.stages, self.name = stopwatch_of_call(verbose=spec.verbose), type(spec.model).__name__
        self._profile, self._tiers = spec.known_profile, spec.tiers  # these refuse before the trace
        if not spec.cuda_graphs:
            self.traced = self._trace(**of_trace)
            return
        from remat.rewriter.arena.capturable import require_capturable_ops, require_graph_device

        device = require_graph_device(spec.model)
        self.traced = self._trace(**of_trace | {"gradient_release": False})
        require_capturable_ops(self.traced.joint.module, device)

    def _trace(self, **of_trace: Any) -> Trace:
        with self.stages.stage("capture", f"tracing {self.name}"):
            return trace(self.spec.model, **self.spec.of_trace, **of_trace)

    def costed(self, one: Trace, *, chunks: bool = True) -> TrainingGraph:
        sharding = self.spec.sharding
        most_bytes = self.spec.parsed_budget.most_bytes(local_step(one.graph, sharding))
        with self.stages.stage("profile", "timing ops") as shown:
            known: Any = {"profile": self._profile, "tiers": self._tiers, "most_bytes": most_bytes}
            graph = add_costs(one, progress=shown, chunks=chunks, **known)
        return local_step(graph, sharding, is_rewritten=True)

    def in_chunks(self, graph: TrainingGraph) -> TrainingGraph:
        with self.stages.stage("profile", "timing large layers in chunks") as shown:
            return with_measured_chunks(self.traced, graph, shown)

    def solve(
        self, graph: TrainingGraph, /, *, budget: str | SupportsIndex | None = None, **known: Any
    ) -> Result:
        shown_budget = self.spec.budget if budget is None else budget
        with self.stages.stage("solve", f"solving for {shown_budget}") as shown:
            listen = {"progress": solver_shown(shown, shown_budget)}
            return self.spec.parsed(shown_budget).solve(
                graph, **listen, **self.spec.of_solve, **known
            )

    def may_wait(self, budget: Budget | None = None) -> bool:
        return may_wait(self.traced, budget or self.spec.parsed_budget)

    def found(
        self, budget: str | SupportsIndex | None = None, graph: TrainingGraph | None = None
    ) -> Solved:
        """The outcome for a budget, None for the spec's, and its graph; `graph` has costs."""
        solve_for = functools.partial(self.solve, budget=budget)
        waits = self.may_wait(None if budget is None else self.spec.parsed(budget))
        graph = self.costed(self.traced, chunks=not waits) if graph is None else graph
        if not waits:
            return Solved(graph, solve_for(graph))
        return solved_at_need(self.traced, graph, solve_for, self.in_chunks, self.stages)

    def required(self, found: Solved) -> Solved:
        """`found`, which has a schedule; a `BudgetError` names the least budget known to fit."""
        if found.result.schedule is not None:
            return found
        again = functools.partial(self.solve, budget=budget_again(found.result))
        lost = naming_tolerance(found.result, self.traced, found.graph, self.costed, again)
        raise BudgetError(infeasible_text(lost))

    def compared(
        self, module: nn.Module, graph: TrainingGraph, budget_bytes: int, *, is_bound: bool = True,
        ranks: CollectiveCall | None = None,
    ) -> Check | None:  # fmt: skip
        """A step of `module` beside eager's; None without room. `ranks` compare too, or none."""
        spec = self.spec
        beside = reference_of(graph, budget_bytes, spec.model, spec.batch)
        is_run = is_checked(self.traced.graph if ranks else graph, spec.check, beside)
        if not (ranks.all_agree("check", is_run) if ranks else is_run):
            return None
        most_bytes = budget_bytes if is_bound else None
        with self.stages.stage("check", f"comparing a step of {self.name} with eager"):
            return unless_short(
                lambda: require_equal(spec.model, module, spec.batch, most_bytes, beside)
            )

    def say_planned(
        self, found: Solved, checked: Check | None, *, is_compared: bool = False
    ) -> None:
        title, seconds = self.traced.recipe.title, self.stages.elapsed_s
        levers = levers_text(found.graph, found.result.schedule)
        said = planned_text(title, found, checked, seconds, levers, is_compared=is_compared)
        self.stages.say(said)
        way = compiled_text(found.graph, str(self.spec.budget))
        if way and not any(self.spec.asked[name] for name in _NOT_COMPILED):
            self.stages.say(f"remat: {way}")


def plan_one_size(spec: StepSpec) -> fx.GraphModule:
    refuse_fake(spec.group)
    if spec.compile and has_dtensors(spec.model):
        raise RewriteError(
            f"leave out compile=True: {type(spec.model).__name__} has parameters that are "
            "DTensors, whose plans run eager's ops"
        )
    # Each rank would choose by its own times; what Inductor fuses, chunks may only make slower.
    is_whole = spec.split is None and (spec.compile or spec.group is not None)
    with (
        CollectiveCall(spec.group, "remat.rematerialize") as ranks,
        parameters_cast(spec.model, spec.sharding),
    ):
        planner = StepPlanner(
            spec, sharding=spec.sharding, float_inputs=spec.float_inputs,
            split="none" if is_whole else spec.split, gradient_release=release_of(spec),
        )  # fmt: skip
        traced = planner.traced
        updates = updates_of(spec, traced)
        require_group(traced.joint.module, spec.group)

        @functools.cache
        def traces() -> TracesOfPlans:
            from remat.compile.code_plans import TracesOfPlans

            return TracesOfPlans(spec.model, traced)

        def make() -> Solved:
            found = planner.required(planner.found())
            if not spec.compile:  # its import takes Inductor's seconds
                return found
            from remat.compile.code_plans import with_fitting_code

            return with_fitting_code(traces(), planner.found, found, spec.budget)

        ranks.require_same_step(traced.graph.hash)
        found = ranks.from_first(make, Solved)
        if spec.compile:
            from remat.compile.code_plans import compiled_module

            asked: Any = {"audit": spec.audit, "updates": updates}
            module, is_bound = compiled_module(traces(), found, spec.budget, **asked)
        else:
            assert found.result.schedule is not None
            own = msgspec.structs.replace(traced.graph, regions=found.graph.regions)
            schedule = before_sharding(found.result.schedule, found.graph, own)
            asked = {"trace": traced, "audit": spec.audit, "updates": updates}
            module = rewrite(spec.model, schedule, **asked, **facts_of(found))
            is_bound = spec.sharding.kind == "none"
        is_bound = is_bound and updates is None  # the check updates nothing: its peak is another
        agree_on_audits(ranks, [module])
        # The profiler does not see what gloo's threads free, so it cannot hold such a step to it.
        is_bound = is_bound and not collectives_in(traced.joint.module)
        checked = planner.compared(
            module, found.graph, found.result.budget_bytes, is_bound=is_bound, ranks=ranks
        )
        planner.say_planned(found, checked)
    type(module)._remat_check = checked
    tell_wrapper(module, spec.sharding, accumulates=spec.accumulate)
    if spec.cuda_graphs:  # after the comparison, which runs steps of its own
        from remat.rewriter.arena.captured import capture_steps

        capture_steps(module)
    return module


def whole_or_in_parts(spec: StepSpec, whole: Callable[[StepSpec], nn.Module]) -> nn.Module:
    """The module that `whole` makes of a step; of one that is no one graph, one in parts."""
    try:
        return whole(spec)
    except CaptureError as error:
        from remat.parts.planned import planned_in_parts  # a wing, which most models never enter

        return planned_in_parts(spec, error)
