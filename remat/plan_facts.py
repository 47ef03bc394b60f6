"""What a plan knows: its schedule, where it came from, and what it says where it lacks one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from remat.graph_capture.errors import BudgetError, PlanError
from remat.graph_capture.graph import TrainingGraph, TrainingStep
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.schedules.family import Family, resized_schedule
from remat.schedules.outcome import Check, Result
from remat.schedules.plan import PlanFile
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate

if TYPE_CHECKING:
    from torch import nn


class PlanFacts(Result, frozen=True):
    """The fields of `remat.Plan`, and how they are found; each is described there."""

    step: TrainingGraph | RangedGraph | None = None
    family: Family | None = None
    source: Any = None
    code: Any = None
    check: Check | None = None

    @classmethod
    def from_result(cls, result: Result, **known: Any) -> Self:
        """The plan of what a solver returned; `known` are the other fields."""
        # Of a result that is a plan, as one at hand is, what it says of another step is left out.
        return cls(**{name: getattr(result, name) for name in Result.__struct_fields__}, **known)

    @classmethod
    def from_family(cls, family: Family, step: RangedGraph | None, source: Any = None) -> Self:
        """The plan of a family; figures are of the largest sizes, the peak that of any size."""
        schedule = family.top.schedule
        figures: dict[str, Any] = {"overhead": family.top.overhead}
        if step is not None:
            graph = of_one_size(step)
            schedule = resized_schedule(schedule, graph)
            figures["time_us"] = simulate(graph, schedule).time_us
            figures["lower_bound_us"] = graph.time_us * (1 + family.top.lower_overhead)
        return cls(
            status="feasible", solver=schedule.solver, budget_bytes=family.budget_bytes,
            schedule=schedule, peak_bytes=family.peak_bytes, step=step, family=family,
            source=source, **figures,
        )  # fmt: skip

    # What the questions are asked of, or why they cannot be.

    def _graph(self) -> TrainingGraph:
        if self.step is None:
            raise PlanError(
                "ask the plan that remat.solve made of what remat.capture returned: the step "
                "behind this plan is not available"
            )
        return of_one_size(self.step)

    def _scheduled(self) -> Schedule:
        if self.schedule is None:
            from remat.solved import infeasible_text

            raise BudgetError(infeasible_text(self))
        return self.schedule

    def _ranged(self) -> RangedGraph:
        if not isinstance(self.step, RangedGraph):
            raise PlanError(
                "capture a range with remat.capture(..., dynamic=...), and solve that: this plan "
                "is for one size, or its step is not available"
            )
        return self.step

    def _members(self) -> Family:
        if self.family is None:
            raise PlanError(
                "solve the range again with remat.solve, for one schedule for each part of it: "
                "this plan has one schedule for the whole range"
            )
        return self.family

    def _module(self) -> nn.Module:
        if self.source is None or isinstance(self.source, PlanFile):
            raise PlanError(
                "apply it, and ask the plan of the module, remat.plans(plan.apply(model))[0]: no "
                "module follows this plan"
            )
        return self.source

    def _file(self) -> PlanFile:
        if self.code is not None:
            raise PlanError(
                "use remat.rematerialize for a plan that a file can hold: torch.compile keeps the "
                "plans of its graphs itself, with the code"
            )
        if isinstance(self.source, PlanFile):
            return self.source
        if self.source is None:
            raise PlanError(
                "apply the plan, and save that, remat.plans(plan.apply(model))[0].save(path): a "
                "file needs to know the model and its batch, and this plan does not"
            )
        from remat.rewriter.plans.loading import plan_of

        return plan_of(self.source)

    def _repr_html_(self) -> str:
        if self.schedule is None or self.step is None:  # without its step nothing can be drawn
            return super()._repr_html_()
        from remat.analysis.plan_report import plan_card

        return plan_card(self._graph(), self, self.check)

    def __str__(self) -> str:
        return str(self.family or self.code or repr(self))

    def __repr__(self) -> str:
        if self.code is not None:
            return repr(self.code)
        if self.family is not None:
            return repr(self.family)
        if self.schedule is not None and not self.peak_bytes:
            return f"Plan({self.solver}, within {self.budget_bytes} bytes; its costs are not known)"
        return Result.__repr__(self)


def of_one_size(step: TrainingStep) -> TrainingGraph:
    """The step itself; of a range that of its largest sizes, with bytes that bound all others."""
    graph = step.bounding(step.symbols) if isinstance(step, RangedGraph) else step
    assert isinstance(graph, TrainingGraph)
    return graph
