"""A whole optimizer step of several microbatches, planned over device, host and NVMe.

For devices of the table: nothing is run. `graph_capture/optimizer_step` makes the graph of it, and
`solver/whole_step/whole_step` searches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remat.budgets import parse_budget
from remat.formats import bytes_text
from remat.graph_capture.errors import BudgetError, option
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.optimizer_step.update import Update
from remat.levers.step_request import StepRequest
from remat.schedules.as_planned import whole
from remat.schedules.schedule import Schedule
from remat.schedules.simulation import Simulation
from remat.solver.whole_step.layers import microbatch_of
from remat.solver.whole_step.planned_step import PlannedStep, Short, StepTask
from remat.solver.whole_step.whole_step import StepResult, plan_whole_step

if TYPE_CHECKING:
    from torch import nn

    from remat.graph_capture.prices.profile import Profile

Told = Callable[[str], None]
OPTION_OF = {"device": "budget", "host": "host"}
"""What gives a tier its room, in the command line and in Python."""


@dataclass(frozen=True)
class StepPlan:
    """A whole step, planned.

    Attributes
    ----------
    request : what was asked for. task : layers, links and the budget in bytes.
    found : the plan, its bound, and the named systems beside it. Without a plan, `shortage` says
        what is too small.
    """

    request: StepRequest
    task: StepTask
    found: StepResult

    @property
    def best(self) -> PlannedStep:
        """The plan."""
        assert self.found.plan is not None
        return self.found.plan

    @property
    def graph(self) -> TrainingGraph:
        """The graph of the whole step that the schedule is of."""
        return self.best.graph

    @property
    def schedule(self) -> Schedule:
        """The plan's steps."""
        return self.best.schedule

    @property
    def simulation(self) -> Simulation:
        """What the judge says of it."""
        return self.best.simulation

    @property
    def shortage(self) -> str:
        """Where nothing fits, the tier that is too small, and what is known to do; else empty."""
        short, links = self.found.short, self.task.links
        if self.found.plan is not None or short is None:
            return ""
        rooms = {"device": self.task.budget_bytes, "host": links.host_bytes}
        more = " or more room on NVMe" if short.tier == "host" else ""
        return (
            f"no plan of this step fits: {too_small_text(short)}, and {OPTION_OF[short.tier]} "
            f"gives {bytes_text(rooms[short.tier])}. Give that{more}"
        )

    def tokens_per_s(self, simulation: Simulation) -> float:
        """Tokens of the step over its time; 0 where the batch has no ids of tokens."""
        tokens = self.request.microbatches * self.task.microbatch.n_tokens
        return tokens / simulation.time_us * 1e6

    def __repr__(self) -> str:
        if self.shortage:
            return f"StepPlan({self.shortage})"
        simulation = self.simulation
        return (
            f"StepPlan({self.task.microbatch.name}: {self.request.microbatches} microbatches in "
            f"{simulation.time_us / 1e6:.2f} s, device {bytes_text(simulation.peak_bytes)}, "
            f"host {bytes_text(simulation.host_peak_bytes)})"
        )


def plan_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    request: StepRequest,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    profile: Profile | None = None,
    told: Told = lambda _: None,
) -> StepPlan:
    """Capture one batch, and plan a step of as many such batches as the request asks for.

    Raises
    ------
    CaptureError, DeviceError, SolverError : the step cannot be captured or has no layers.
    """
    from remat.graph_capture.capturing import price_for, tiers_for
    from remat.graph_capture.tracing.trace import trace

    told("tracing one batch")
    tiers = tiers_for(model, request.device, request.host, request.nvme)
    traced = trace(
        model, args, kwargs, loss_fn=loss_fn, target=target, device=request.device, split="none"
    )
    graph = whole(price_for(traced, profile=profile, tiers=tiers))
    return planned_from(graph, request, told=told)


def planned_from(
    graph: TrainingGraph, request: StepRequest, *, told: Told = lambda _: None
) -> StepPlan:
    """The plan of a step from the captured graph of one batch, which has links."""
    if graph.links is None:
        raise BudgetError(
            f"the graph of {graph.name} has no links to a host: capture it with "
            f"{option('host', '120GiB')}"
        )
    told("looking at the layers")
    task = StepTask(
        microbatch_of(graph),
        Update.on(request.device, request.optimizer, request.state),
        request.links(graph.links),
        parse_budget(request.budget).bytes_for(graph),
    )
    return StepPlan(request, task, plan_whole_step(task, request.microbatches, progress=told))


def too_small_text(short: Short) -> str:
    """What a setting lacks: a tier, and the least that is known to do."""
    return f"the {short.tier} needs {bytes_text(short.need_bytes)}"
