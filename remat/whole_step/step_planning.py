"""A whole optimizer step of several microbatches, planned over device, host and NVMe.

For devices of the table: nothing is run. `step_graph.py` makes the graph of it, `step_search.py`
searches, and here it is chosen what runs in chunks, and found which rooms would be enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec

from remat.budgets import parse_budget
from remat.formats import budget_text, bytes_text
from remat.graph_capture.devices.known_devices import CPU, device_table, is_in_table
from remat.graph_capture.devices.memory import lower_tiers
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import BudgetError, CaptureError, DeviceError, option
from remat.graph_capture.graph import Link, Links, Optimizer, TrainingGraph
from remat.schedules.derived import fastest_us, in_chunks, unchunked
from remat.schedules.schedule import ChunkedRegion, Schedule
from remat.schedules.simulate import Simulation
from remat.whole_step.config_changes import orders
from remat.whole_step.layers import microbatch_of
from remat.whole_step.microbatch import HOST_GB_S, MOMENTS, Ranks, StateKind, Update
from remat.whole_step.planned_step import PlannedStep, Short, StepTask
from remat.whole_step.rank_share import (
    beside_collectives,
    in_shards,
    ranks_of,
    require_shards,
    share_of,
)
from remat.whole_step.step_search import (
    MOST_JUDGED,
    StepResult,
    least_step_us,
    plan_whole_step,
)

if TYPE_CHECKING:
    from torch import nn

    from remat.graph_capture.costs.cache import Profile
    from remat.graph_capture.tracing.recipe import Split
    from remat.step_spec import StepSpec


@dataclass(frozen=True)
class StepRequest:
    """What is asked of a plan of a whole step, refused before anything runs.

    `optimizer`, `state` : whose update it is, and in which type its state is kept. `budget` : of
    the device, in bytes or ``auto``. `host`, `nvme` : as of `remat.capture`. `nvme_gb_s` :
    sustained rate of NVMe each way, in 10^9 bytes a second; None for that of the drive in the
    table. `is_run` : whether the step is to be run here too, rather than planned alone.
    `sharding` : over how many ranks; the budget is one rank's, host and NVMe are a machine's.
    """

    device: str
    microbatches: int
    optimizer: Optimizer
    budget: str | SupportsIndex = "auto"
    host: str | SupportsIndex | None = None
    nvme: str | None = None
    state: StateKind = "float32"
    nvme_gb_s: float | None = None
    is_run: bool = False
    sharding: Sharding = NO_SHARDING

    def __post_init__(self) -> None:
        require_shards(self.sharding)
        if type(self.microbatches) is not int:
            raise BudgetError(
                f"give microbatches as a whole number, such as 4: it is {self.microbatches!r}"
            )
        if self.microbatches < 1:
            raise BudgetError(
                f"give 1 or more microbatches: {self.microbatches} leave nothing to train on"
            )
        if not is_in_table(self.device) and not (self.is_run and self.device == CPU):
            raise DeviceError(
                f"name a device of the table ({', '.join(device_table().devices)}), not "
                f"{self.device}: a whole step over the host is only planned for those, and run on "
                "a CPU with remat.rematerialize(model, ..., microbatches=...).\n"
                "Or train here without microbatches=, which moves activations"
            )
        if self.host is None:
            raise BudgetError(
                f"give {option('host', '120GiB')} too, or leave out {option('microbatches')}: a "
                "whole step is planned over the device and its host"
            )
        if self.optimizer not in MOMENTS:
            raise CaptureError(
                f"name an optimizer, {', '.join(MOMENTS)}: {self.optimizer!r} has no update to plan"
            )
        if parse_budget(self.budget).is_of_the_step:
            raise BudgetError(
                f"give the budget as bytes, such as 22GiB, or auto: {self.budget!r} only makes "
                "sense without microbatches"
            )
        if self.nvme_gb_s is not None and (self.nvme is None or self.nvme_gb_s <= 0):
            raise BudgetError(
                f"give {option('nvme', '/mnt/nvme:200GiB')} too, and a rate above 0: "
                f"{self.nvme_gb_s:g} GB/s is the rate of NVMe"
            )
        lower_tiers(self.host, self.nvme, self.device)  # raises if they cannot be read

    def ranks(self, title: str = "", profile: Profile | None = None) -> Ranks | None:
        if self.sharding.kind == "none":
            return None
        from remat.graph_capture.distributed.collective_costs import links_of_step

        links = links_of_step(self.device, title, profile)
        return ranks_of(self.sharding, self.device, links, HOST_GB_S)

    def links(self, links: Links) -> Links:
        if self.nvme_gb_s is None or links.write is None or links.read is None:
            return links
        # From GB/s to bytes a microsecond.
        rate = self.nvme_gb_s * 1e3
        return msgspec.structs.replace(
            links, write=Link(rate, links.write.latency_us), read=Link(rate, links.read.latency_us),
            source=f"{links.source.partition(';')[0]}; NVMe {self.nvme_gb_s:g} GB/s as asked for",
        )  # fmt: skip


def step_request(spec: StepSpec) -> StepRequest:
    from remat.graph_capture.devices.placement import resolved_device
    from remat.graph_capture.joint.gradients import require_known

    optimizer = spec.optimizer_in_backward
    assert optimizer is not None
    assert spec.microbatches is not None
    require_known(optimizer)
    # Adam and AdamW keep two moments; SGD keeps one with momentum, else none.
    moments = "adamw" if "betas" in optimizer.defaults else "sgd"
    if optimizer.defaults.get("momentum"):
        moments = "momentum"
    # torch's optimizers keep moments in the parameter's type.
    return StepRequest(
        resolved_device(None, spec.model), spec.microbatches, moments, spec.budget, spec.host,
        spec.nvme, "parameter", is_run=True, sharding=spec.sharding,
    )  # fmt: skip


_Told = Callable[[str], None]
_OPTION_OF = {"device": "budget", "host": "host"}
"""What gives a tier its room, in the command line and in Python."""


@dataclass(frozen=True)
class StepPlan:
    """A whole step, planned.

    Attributes
    ----------
    request : what was asked for. task : layers, links and the budget in bytes.
    found : the plan, its bound, and the named systems beside it. Without a plan, `shortage` says
        what is too small. chunks : what runs in chunks. enough : without a plan, rooms for one.
    """

    request: StepRequest
    task: StepTask
    found: StepResult
    chunks: tuple[ChunkedRegion, ...] = ()
    enough: tuple[Short, ...] = ()

    @property
    def best(self) -> PlannedStep:
        assert self.found.plan is not None
        return self.found.plan

    @property
    def graph(self) -> TrainingGraph:
        return self.best.graph

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule

    @property
    def simulation(self) -> Simulation:
        return self.best.simulation

    @property
    def shortage(self) -> str:
        """Where nothing fits, rooms with which a plan was found; else empty."""
        short, links = self.found.short, self.task.links
        if self.found.plan is not None or short is None:
            return ""
        ranks = self.task.microbatch.ranks
        sharers = {"device": 1, "host": ranks.here if ranks else 1}  # the host is a machine's
        rooms = {"device": self.task.budget_bytes, "host": links.host_bytes * sharers["host"]}
        asked = [
            option(_OPTION_OF[one.tier], budget_text(one.need_bytes * sharers[one.tier]))
            for one in self.enough
        ]
        given = [
            f"{bytes_text(rooms[one.tier])} on the {one.tier}" for one in self.enough or [short]
        ]
        more = " or more room on NVMe" if short.tier == "host" else ""
        return (
            f"give {' and '.join(asked) or f'the {short.tier} more'}{more}: no plan of this step "
            f"fits {' and '.join(given)}"
        )

    def tokens_per_s(self, simulation: Simulation) -> float:
        """Of all ranks: tokens of the step over its time; 0 where the batch has no ids of them."""
        tokens = self.request.microbatches * self.task.microbatch.n_tokens
        tokens *= self.request.sharding.world_size
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
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, request: StepRequest,
    *, loss_fn: Callable[..., Any] | None = None, target: Any = None,
    profile: Profile | None = None, split: Split | None = None, told: _Told = lambda _: None,
) -> StepPlan:  # fmt: skip
    from remat.graph_capture.capture_api import add_costs, tiers_for
    from remat.graph_capture.tracing.trace import trace

    told("tracing one batch")
    tiers = tiers_for(model, request.device, request.host, request.nvme)
    traced = trace(
        model, args, kwargs, loss_fn=loss_fn, target=target, device=request.device, split=split
    )
    graph = add_costs(traced, profile=profile, tiers=tiers)
    return planned_from(graph, request, told=told)


def planned_from(
    graph: TrainingGraph, request: StepRequest, *, told: _Told = lambda _: None
) -> StepPlan:
    if graph.links is None:
        raise BudgetError(
            f"capture with {option('host', '120GiB')}: the graph of {graph.name} has no links to "
            "a host"
        )
    told("looking at the layers")
    ranks, links = request.ranks(), request.links(graph.links)
    host_gb_s = HOST_GB_S / (ranks.here if ranks else 1)
    update = Update.on(request.device, request.optimizer, request.state, host_gb_s)
    budget_bytes = parse_budget(request.budget).bytes_for(graph)

    def task_of(one: TrainingGraph) -> StepTask:
        microbatch = microbatch_of(one)
        if ranks is None:
            return StepTask(microbatch, update, links, budget_bytes)
        shards = in_shards(ranks, microbatch, one)
        here = beside_collectives(share_of(ranks, links, HOST_GB_S), shards)
        return StepTask(shards, update, here, budget_bytes)

    return fastest_plan(graph, task_of, request, told)


_TaskOf = Callable[[TrainingGraph], StepTask]
_GROWTHS = (1.0, 1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 4.0)
"""A room that is too small grows by this at least: other room, other configs, other needs."""


def fastest_plan(
    graph: TrainingGraph, task_of: _TaskOf, request: StepRequest, told: _Told = lambda _: None
) -> StepPlan:
    """As of `plan_whole_step`, with one of the graph's regions in chunks where that is faster."""
    best = _searched(graph, task_of, request, MOST_JUDGED, told)
    if best.found.short is None:
        return best
    told("looking for room that is enough")
    return dataclasses.replace(best, enough=_enough(graph, task_of, request, best.found.short))


def _enough(
    graph: TrainingGraph, task_of: _TaskOf, request: StepRequest, short: Short | None
) -> tuple[Short, ...]:
    """Sizes of tiers, as they are printed, with which a plan was found."""
    rooms, starts = dict[str, int](), len(orders(request.microbatches))  # a plan, not the fastest
    for growth in _GROWTHS:
        if short is None:
            break
        need_bytes = max(short.need_bytes, int(growth * rooms.get(short.tier, 0)))
        rooms[short.tier] = parse_budget(budget_text(need_bytes)).size_bytes
        roomy = _searched(graph, lambda one: task_of(one).with_rooms(rooms), request, starts)
        if roomy.found.plan is not None:
            return tuple(Short(tier, size_bytes) for tier, size_bytes in sorted(rooms.items()))
        short = roomy.found.short
    return ()


def _searched(
    graph: TrainingGraph, task_of: _TaskOf, request: StepRequest, most: int,
    told: _Told = lambda _: None,
) -> StepPlan:  # fmt: skip
    task, count = task_of(unchunked(graph)), request.microbatches
    best = StepPlan(request, task, plan_whole_step(task, count, most=most, progress=told))
    bound_us = least_step_us(task, count, graph.time_us - fastest_us(graph))
    for region in graph.regions:
        for choice in region.choices:
            chunks = (ChunkedRegion(region.name, choice.chunks, choice.exact),)
            task = task_of(in_chunks(graph, chunks))
            found = plan_whole_step(task, count, most=most, known=best.found, progress=told)
            if found.rank >= best.found.rank:
                break  # more of them take longer still
            best = StepPlan(request, task, found, chunks)
    return dataclasses.replace(best, found=dataclasses.replace(best.found, lower_bound_us=bound_us))
