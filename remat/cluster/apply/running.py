"""The runner of a rank's step: a schedule of torch's over its stages, or a plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from remat.cluster.apply.cluster_mesh import PP
from remat.cluster.apply.rank_orders import ZERO_BUBBLE, one_stage_rings, rings_of
from remat.cluster.torch_orders import ONE_STAGE
from remat.rewriter.split_backward.splitting import split_backward
from remat.rewriter.stages.receive_ring import RingStage
from remat.rewriter.stages.stepping import PipelineStep, PlainStep, StepRunner, loss_itself

if TYPE_CHECKING:
    from remat.cluster.apply.parts_of_rank import RankParts


def runner_of(parts: RankParts) -> StepRunner:
    """What runs a step of the parts, which are wrapped."""
    plan, name = parts.asked.plan, parts.asked.schedule
    if parts.asked.mesh[PP].size() == 1:
        return PlainStep(parts.modules[0], plan.microbatches, reduce_each=plan.gradients == "each")
    stages = [_stage_of_torch(parts, i) for i in range(len(parts.modules))]
    kind: Any = get_schedule_class(name)
    is_one = name in ONE_STAGE
    schedule = kind(
        stages[0] if is_one else stages, n_microbatches=plan.microbatches, loss_fn=loss_itself
    )
    for stage in stages:
        stage.input_buffers, stage.gradient_buffers = _rings(parts, stage, schedule)
    return PipelineStep(schedule, stages)


def _stage_of_torch(parts: RankParts, at: int) -> RingStage:
    asked, border = parts.asked, parts.given.border
    index, stages = asked.stages[at], len(asked.layers)
    # Torch would otherwise run a forward and a backward to learn these.
    received = torch.empty_like(border, device="meta").requires_grad_()
    loss = torch.empty((), dtype=torch.float32, device="meta")
    # A rewritten block is one autograd node: torch would run all of it for I, and again for W.
    is_split = asked.schedule in ZERO_BUBBLE and parts.chosen.is_rewritten
    split = split_backward(parts.modules[at]) if is_split else None
    made = RingStage(
        parts.modules[at], index, stages, border.device,
        input_args=parts.args if index == 0 else (received,),
        output_args=(loss if index == stages - 1 else received,), group=asked.mesh.get_group(PP),
        dw_builder=None if split is None else split.dw_builder,
    )  # fmt: skip
    if split is not None:
        made.split = split.live
    return made


def _rings(parts: RankParts, stage: RingStage, schedule: Any) -> tuple[int, int]:
    m, name = parts.asked.plan.microbatches, parts.asked.schedule
    if name in ONE_STAGE:
        return one_stage_rings(name, stage.stage_index, stage.num_stages, m)
    actions = schedule.pipeline_order_with_comms[stage.group_rank]
    keeps = name in ZERO_BUBBLE and stage.dw_builder is None
    return rings_of(actions, stage.stage_index, m, keeps_inputs=keeps)
