"""A whole optimizer step of several microbatches: planned, and made ready to run on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from remat.budgets import parse_budget
from remat.graph_capture.devices.links import BYTES_PER_US_IN_GB_S
from remat.graph_capture.distributed.sharding import Sharding, shard_shape
from remat.graph_capture.errors import BudgetError, CaptureError, DeviceError, option
from remat.graph_capture.graph import Tier
from remat.levers.optimizer_in_backward import require_no_other_reader, require_own_storages
from remat.progress import stopwatch_of_call
from remat.ranks.collective_call import CollectiveCall, values_digest
from remat.schedules.derived import in_chunks, unchunked
from remat.schedules.schedule import ChunkedRegion, Schedule, Step
from remat.schedules.simulate import simulate
from remat.step_spec import StepSpec, is_default
from remat.whole_step.layers import microbatch_of
from remat.whole_step.microbatch import MOMENTS, ParameterUpdate, Ranks, Update, UpdateGroup
from remat.whole_step.op_writer import op_by_op
from remat.whole_step.planned_step import PlannedStep, StepTask
from remat.whole_step.rank_share import in_shards, share_of
from remat.whole_step.step_config import StepConfig
from remat.whole_step.step_planning import StepRequest, fastest_plan, step_request

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from remat.graph_capture.costs.cache import Profile
    from remat.graph_capture.graph import Optimizer as OptimizerName
    from remat.graph_capture.graph import TrainingGraph
    from remat.graph_capture.tracing.recipe import Split
    from remat.graph_capture.tracing.traced_step import Trace
    from remat.rewriter.guards.forward import Guards
    from remat.whole_step.program import JointResults
    from remat.whole_step.running import WholeStep


def _parameter_updates(
    optimizer: Optimizer, kind: OptimizerName, parameters: Mapping[str, nn.Parameter], device: str
) -> dict[str, ParameterUpdate]:
    from remat.graph_capture.devices.known_devices import allocator_rounding
    from remat.graph_capture.devices.placement import meter_of
    from remat.graph_capture.joint.gradients import UpdateCosts

    # Measured on made data, so the user's state stays as it is.
    costs = UpdateCosts(optimizer, parameters, meter_of(device), allocator_rounding(device))
    sizes = {name: p.untyped_storage().nbytes() for name, p in parameters.items()}
    return {
        name: ParameterUpdate(MOMENTS[kind] * size, costs.together((name,)))
        for name, size in sizes.items()
    }


def _over_shards(
    ranks: Ranks, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]
) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """Stand-ins to measure with, of one rank: the parameters' shards, and their optimizer."""
    from torch import nn

    shards = {
        name: nn.Parameter(one.new_empty(shard_shape(one.shape, ranks.count)))
        for name, one in trained.items()
    }
    of = {id(one): shards[name] for name, one in trained.items()}
    like = copy.copy(optimizer)
    like.param_groups = [
        {**group, "params": [of[id(p)] for p in group["params"] if id(p) in of]}
        for group in optimizer.param_groups
    ]
    return like, shards


def _said(optimizer: Optimizer) -> str:
    groups = optimizer.param_groups
    said = [{**group, "params": len(group["params"])} for group in groups]
    return f"{type(optimizer).__qualname__} {said}"


def _require_rows(parameters: _Parameters) -> None:
    for path, parameter in parameters.values():
        if not parameter.is_contiguous():
            raise CaptureError(
                f"make {path} contiguous, or leave out {option('sharding')}: ranks share "
                "parameters by rows, and its rows are not one after the other in memory"
            )


def _measured_update(
    optimizer: Optimizer, kind: OptimizerName, largest: nn.Parameter, device: str
) -> Update:
    """The update at the rate of memory at which one parameter goes through it here."""
    from remat.graph_capture.devices.placement import meter_of
    from remat.graph_capture.joint.gradients import UpdateCosts

    meter = meter_of(device)
    (made,), step = UpdateCosts(optimizer, {"": largest}, meter, int).made_step(("",))
    alone = UpdateGroup("", made.numel(), made.nbytes, made.nbytes, made.element_size())
    unit = Update(kind, "parameter", 1.0, 1.0)
    # At 1 GB/s, an update's time tells its bytes.
    moved_bytes = round(unit.device_us(alone) * BYTES_PER_US_IN_GB_S)
    took_us = meter.median_us(step, moved_bytes)
    rate = moved_bytes / took_us / BYTES_PER_US_IN_GB_S
    # A CPU is its own host.
    return Update(kind, "parameter", rate, rate)


_Parameters = dict[str, tuple[str, "nn.Parameter"]]
"""By its name in the graph, each parameter with the path that the user knows."""


class _Chosen(msgspec.Struct, frozen=True):
    """A plan, as the first rank tells it to the others."""

    config: StepConfig
    chunks: tuple[ChunkedRegion, ...]
    steps: tuple[Step, ...]


class StepHere:
    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None,
        request: StepRequest, optimizer: Optimizer, *, loss_fn: Callable[..., Any] | None = None,
        target: Any = None, profile: Profile | None = None, split: Split | None = None,
    ) -> None:  # fmt: skip
        from remat.graph_capture.capture_api import add_costs, tiers_for
        from remat.graph_capture.tracing.trace import trace
        from remat.whole_step.program import refuse_unusual

        self.model, self.request, self.optimizer = model, request, optimizer
        tiers = tiers_for(model, request.device, request.host, request.nvme)
        traced = trace(
            model, args, kwargs, loss_fn=loss_fn, target=target, device=request.device, split=split
        )
        # Refuse before anything is measured.
        refuse_unusual(traced)
        require_no_other_reader(traced, optimizer)
        self._runs(traced)
        _require_in_optimizer(self.guards, self.results, self.parameters, optimizer)
        self.costed = add_costs(traced, profile=profile, tiers=tiers)
        trained = {name: self.parameters[name][1] for name in self.results.gradient_of}
        self.ranks, of = request.ranks(), (optimizer, trained)
        if self.ranks is not None:
            _require_rows(self.parameters)
            of = _over_shards(self.ranks, optimizer, trained)
        self.updates = _parameter_updates(of[0], request.optimizer, of[1], request.device)
        largest = max(trained.values(), key=lambda one: one.numel())
        self.update = _measured_update(optimizer, request.optimizer, largest, request.device)
        self.graph = unchunked(self.costed)
        self.task = self._task(self.graph)

    def _runs(self, traced: Trace) -> None:
        """The step that is run is that of a trace."""
        from remat.rewriter.guards.forward import Guards
        from remat.whole_step.program import joint_results

        module = traced.joint.module
        self.traced, self.results = traced, joint_results(traced.joint, traced.recipe.name)
        self.guards = Guards(self.model, traced.recipe, traced.python_state, (), module, module)
        self.parameters = _parameters_of(self.guards, self.results)

    def _task(self, graph: TrainingGraph) -> StepTask:
        request, updates = self.request, self.updates

        def with_workspace(group: UpdateGroup) -> UpdateGroup:
            found = (updates[name].workspace_bytes for name in group.gradient_of if name in updates)
            # Parameters are updated one by one, and each update gives its workspace back.
            return replace(group, update_workspace_bytes=max(found, default=0))

        assert graph.links is not None
        microbatch, links = microbatch_of(graph, self.results.gradient_of), graph.links
        if self.ranks is not None:
            microbatch = in_shards(self.ranks, microbatch, graph)
            # Links were measured here, with whatever the host's memory gives.
            links = share_of(self.ranks, links, float("inf"))
        return StepTask(
            replace(microbatch, groups=tuple(map(with_workspace, microbatch.groups))),
            self.update,
            request.links(links),
            parse_budget(request.budget).bytes_for(graph),
            # A CPU is its own host, so the device makes all updates.
            host_computes=False,
        )

    def planned(self, call: CollectiveCall) -> PlannedStep:
        """The fastest plan; on several ranks the first one's, as each has other costs."""
        call.require_same_step(self.costed.hash, None if self.ranks is None else self._asked())
        chosen, task = call.from_first(self._fastest, _Chosen), self.task
        if chosen.chunks:
            self._run_in(chosen.chunks)
            task = self.task
        graph = chosen.config.graph(task.microbatch, task.update, task.links)
        schedule = Schedule.for_graph(graph, chosen.steps, budget_bytes=task.budget_bytes)
        return PlannedStep(chosen.config, graph, schedule, simulate(graph, schedule))

    def _asked(self) -> dict[str, str]:
        asked = self.request
        return {
            "microbatches": f"{asked.microbatches}",
            "budget, host and nvme": f"{asked.budget} {asked.host} {asked.nvme}",
            "optimizer": _said(self.optimizer),
            "initial parameters": values_digest(self.parameters.values()),
        }

    def _fastest(self) -> _Chosen:
        plan = fastest_plan(self.costed, self._task, self.request)
        if plan.shortage:
            raise BudgetError(plan.shortage)
        return _Chosen(plan.best.config, plan.chunks, plan.schedule.steps)

    def _run_in(self, chunks: tuple[ChunkedRegion, ...]) -> None:
        from remat.rewriter.rewriting import trace_of_schedule

        self.graph = in_chunks(self.costed, chunks)
        edited = replace(
            Schedule.for_graph(self.graph, ()), chunks=chunks, captured_hash=self.costed.hash
        )
        self._runs(trace_of_schedule(self.model, self.traced.recipe, edited, self.traced))
        self.task = self._task(self.graph)

    def ready(self, planned: PlannedStep) -> WholeStep:
        from remat.rewriter.tiers.file_tier import FileTier
        from remat.whole_step.program import actions_of
        from remat.whole_step.residents import Residents
        from remat.whole_step.running import StepCode, WholeStep, codes_of
        from remat.whole_step.shards import ShardedResidents

        step, results = op_by_op(self.graph, self.task, planned, self.updates), self.results
        found = step.simulation
        # The plan was made for whole layers; this checks the step that runs, op by op.
        if found.peak_bytes > self.task.budget_bytes:
            raise BudgetError(
                f"give a little more budget: op by op, this step of {self.graph.name} has a peak "
                f"of {found.peak_bytes} bytes, above the {self.task.budget_bytes} given"
            )
        tier = FileTier(found.host_peak_bytes, found.nvme_peak_bytes, self.task.links.nvme_path)
        tier.require_room()
        actions = actions_of(step.parts, step.graph, step.schedule)
        codes = codes_of(self.traced.joint, actions, results.place_of_gradient, tier)
        homes: dict[str, Tier] = {v.name: v.home for v in step.graph.values if v.home is not None}
        held = {name: one for name, one in self.parameters.items() if name in homes}
        kind = Residents if self.ranks is None else ShardedResidents
        residents = kind(self.optimizer, held, homes, tier.folders)
        trained = dict(self.parameters[name] for name in results.gradient_of)
        code = StepCode(actions, codes, results)
        return WholeStep(self.guards, self.optimizer, code, residents, step, trained)


def _parameters_of(guards: Guards, results: JointResults) -> _Parameters:
    from torch import nn

    live = guards.live.read()
    assert live is not None
    names = {place: name for name, place in results.place_of_input.items()}
    return {
        names[place]: (path, tensor)
        for place, (path, at) in enumerate(zip(guards.names, guards.taken, strict=True))
        if isinstance(tensor := live[at], nn.Parameter)  # buffers are inputs too
    }


def _require_in_optimizer(
    guards: Guards, results: JointResults, parameters: _Parameters, optimizer: Optimizer
) -> None:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name in results.gradient_of:
        path, parameter = parameters.get(name, ("an input of the batch", None))
        if id(parameter) not in known:
            raise CaptureError(
                f"add {path} of {guards.kind} to the optimizer, or let it not require grad: it "
                "gets a gradient that a whole step would lose"
            )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise CaptureError(
            "leave out amsgrad, which keeps a third value for each parameter, or microbatches=, to "
            "update during backward"
        )
    require_own_storages({**dict(parameters.values()), **dict(guards.model.named_buffers())})


def _ranks_here(sharding: Sharding) -> ProcessGroup | None:
    import torch.distributed as dist

    if sharding.kind == "none":
        return None
    n = dist.get_world_size() if dist.is_initialized() else 1
    if n != sharding.world_size:
        raise DeviceError(
            f"start {sharding.world_size} processes with torchrun, which call "
            f"torch.distributed.init_process_group('gloo'): the sharding has so many ranks, and "
            f"there {'is' if n == 1 else 'are'} {n} here"
        )
    return dist.group.WORLD


_TAKEN = (
    "model", "args", "kwargs", "budget", "microbatches", "optimizer_in_backward", "host", "nvme",
    "sharding", "loss_fn", "target", "profile", "split", "verbose",
)  # fmt: skip


def whole_step_here(given: Mapping[str, Any]) -> WholeStep:
    """One optimizer step of so many batches like this one, as `remat.rematerialize` is asked."""
    said = {name: value for name, value in given.items() if not is_default(name, value)}
    if others := [name for name in said if name not in _TAKEN]:
        raise CaptureError(
            f"leave out {others[0]}=, or microbatches=: it belongs to a step of one batch"
        )
    if said.get("args") is None and said.get("kwargs") is None:
        raise CaptureError("give one batch too: a whole step is planned for batches like it")
    spec = StepSpec.of(said | {"args": said.get("args") or ()})
    if spec.optimizer_in_backward is None:
        raise CaptureError(
            "give optimizer_in_backward=torch.optim.AdamW(model.parameters()) too: a whole step "
            "updates parameters"
        )
    asked = step_request(spec)
    stages, name = stopwatch_of_call(verbose=spec.verbose), type(spec.model).__name__
    group = _ranks_here(spec.sharding)
    with (
        stages.stage("solve", f"planning a whole step of {name}"),
        CollectiveCall(group, "remat.rematerialize") as call,
    ):
        captured = StepHere(
            spec.model, spec.args, spec.kwargs, asked, spec.optimizer_in_backward,
            loss_fn=spec.loss_fn, target=spec.target, profile=spec.known_profile, split=spec.split,
        )  # fmt: skip
        step = captured.ready(captured.planned(call))
    stages.say(f"remat: {step!r}; {stages.elapsed_s:.1f} s")
    return step
