"""Plans as the judge of pipelines finds them: their stages replayed in torch's own order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
from torch.distributed.pipelining import schedules as torch_schedules

from remat.cluster.parts import WeightsLater
from remat.cluster.pipeline_replay import (
    ACTION_KINDS,
    RUNNING,
    STANDING,
    PipelineAction,
    PipelineReplay,
    RankOrder,
    StageCosts,
    in_order,
    replay_pipeline,
)
from remat.cluster.plan_file import MAKE_AGAIN, ClusterFile
from remat.cluster.planner import ClusterPlan, ClusterSearch
from remat.cluster.stages import StagePlan, hop_us
from remat.graph_capture.errors import PlanError, ScheduleError

# Torch makes the actions of each rank in the constructors of its schedules, out of a few facts of a
# stage. They are asked with a stage that has those facts and no module, so no rank is needed.


ONE_STAGE = ("GPipe", "1F1B")  # schedules with one stage a rank; the others have several


def torch_order(name: str, ranks: int, microbatches: int, each: int = 1) -> tuple[RankOrder, ...]:
    """By rank, for torch's schedule `name`; `ScheduleError` if torch refuses these numbers."""
    try:
        kind: Any = torch_schedules.get_schedule_class(name)
        count = 1 if name in ONE_STAGE else each
        stages = [
            SimpleNamespace(
                num_stages=ranks * count, group_size=ranks, group_rank=0, stage_index=i,
                submod=None, stage_index_to_group_rank={}, is_first=i == 0,
                is_last=i == ranks * count - 1, has_backward=True, device="cpu",
            ) for i in range(count)
        ]  # fmt: skip
        made = kind(stages[0] if name in ONE_STAGE else stages, microbatches)
    # Torch raises one or the other for numbers that it does not take.
    except (ValueError, AssertionError) as error:
        raise ScheduleError(
            f"torch's schedule {name} does not take {microbatches} microbatches on {ranks} ranks "
            f"with {each} stages each: {error}"
        ) from error
    order = tuple(tuple(_actions_of(made.pipeline_order[i])) for i in range(ranks))
    return tuple(map(_from_0, order)) if name == "1F1B" else order


def _actions_of(rank: Iterable[Any]) -> Iterator[tuple[PipelineAction, ...]]:
    # A step of a rank may have no action, or several that run together.
    for one in filter(None, rank):
        named = ((a, a.computation_type.value) for a in one.sub_actions or (one,))
        # What moves data or shards is not replayed: a neighbour's result is waited for.
        runs = (
            PipelineAction(a.stage_index, k, a.microbatch_index)
            for a, k in named
            if k in ACTION_KINDS
        )
        if found := tuple(runs):
            yield found


def _from_0(rank: RankOrder) -> RankOrder:
    # Torch's list of 1F1B begins with microbatch 1 on the last rank, which has no forward before
    # the first pair. What torch runs there begins with 0.
    forwards = [a.microbatch for together in rank for a in together if a.kind == "F"]
    shift = min(forwards, default=0)
    return tuple(
        tuple(a._replace(microbatch=a.microbatch - shift * (a.kind == "F")) for a in together)
        for together in rank
    )


class ReplayedPlan(msgspec.Struct, frozen=True):
    """A plan with its stages, replayed.

    `schedule` : torch's name of it; empty without a pipeline. `bubble` : share of time that ranks
    wait. `costs` : by stage and virtual stage.
    """

    plan: ClusterPlan
    stages: tuple[StagePlan, ...]
    schedule: str
    time_us: float
    mfu: float
    bubble: float
    peak_bytes: tuple[int, ...]
    costs: tuple[tuple[StageCosts, ...], ...]


def replayed_plan(search: ClusterSearch, plan: ClusterPlan) -> ReplayedPlan:
    stages, degrees = tuple(search.stages(plan)), plan.mesh.degrees
    each = range(degrees.virtual_stages)
    rows = search.rows_of(plan.mesh, plan.layers)
    costs = tuple(
        tuple(_costs(search, plan, stage, row, i) for i in each)
        for stage, row in zip(stages, rows, strict=True)
    )
    name, time_us, bubble = degrees.schedule, plan.time_us, 0.0
    peaks = tuple(stage.peak_bytes for stage in stages)
    if name:
        order = torch_order(name, degrees.pp, degrees.microbatches, degrees.virtual_stages)
        hop = hop_us(search.job, search.cluster, degrees)
        replay = replay_pipeline(order, in_order(costs), hop)
        # What is not the pipeline's, such as the update, stays as by the formula.
        time_us, bubble = replay.time_us + plan.time_us - plan.pipeline_us, replay.bubble
        peaks = tuple(
            rank.peak_bytes + sum(stage.held_bytes[name] for name in STANDING)
            for rank, stage in zip(replay.ranks, stages, strict=True)
        )
    return ReplayedPlan(plan, stages, name, time_us, search.mfu(time_us), bubble, peaks, costs)


def _costs(
    search: ClusterSearch, plan: ClusterPlan, stage: StagePlan, row: int, at: int
) -> StageCosts:
    """Of one virtual stage: its share of the rank's blocks, and its end of the model."""
    d = plan.mesh.degrees
    first, *blocks, last = search.parts_of(d)
    # Virtual stages of a rank are taken to be alike.
    counts = search.rows.counts[row] / d.virtual_stages

    def of_blocks(times: list[float]) -> float:
        return float(counts @ times)

    forward = of_blocks([block.forward_us for block in blocks])
    backward, saved = of_blocks([block.backward_us for block in blocks]), 0
    is_last = at == d.virtual_stages - 1
    ends = (first, stage.first, at == 0), (last, stage.last, is_last)
    extra_us = stage.extra_us
    for part, option, is_here in ends:
        if option is None:
            continue
        again_us = part.options[option].extra_us
        # What an end computes again runs with its own virtual stage alone.
        extra_us -= again_us
        if is_here:
            forward += part.forward_us
            backward += part.backward_us + again_us
            saved += part.options[option].saved_bytes
    later = [block.later if d.is_split else WeightsLater() for block in blocks]
    weight_us = of_blocks([one.weight_us for one in later])
    return StageCosts(
        forward, backward + extra_us / d.virtual_stages - weight_us, weight_us=weight_us,
        saved_bytes=int(stage.saved_bytes / d.virtual_stages) + saved,
        for_weights_bytes=int(of_blocks([one.held_bytes for one in later])),
        need_bytes=stage.held_bytes[RUNNING] + max(one.held_bytes for one in later),
    )  # fmt: skip


def replay_of(plan: ClusterFile, name: str = "the plan") -> PipelineReplay:
    """Without a pipeline, microbatches go one by one; `PlanError` for files without costs."""
    if not all(stage.costs for stage in plan.stages):
        raise PlanError(
            f"{MAKE_AGAIN}: {name} does not say what its stages take, so its step cannot be drawn"
        )
    costs, mesh = in_order([stage.costs for stage in plan.stages]), plan.parallelism
    how = mesh.pipeline_parallel_schedule
    if not how:
        pairs = ((PipelineAction(0, k, i),) for i in range(plan.microbatches) for k in ("F", "B"))
        return replay_pipeline((tuple(pairs),), costs, plan.hop_us)
    of_torch = mesh.pipeline_parallel_degree, plan.microbatches, plan.virtual_stages
    return replay_pipeline(torch_order(how, *of_torch), costs, plan.hop_us)
