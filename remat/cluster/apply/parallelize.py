"""Applies a plan for a cluster to a model: `remat.parallelize`.

All that runs is torch's: `parallelize_module`, `fully_shard` and the schedules of
`torch.distributed.pipelining`, whose stages have blocks that follow the plan's recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from remat.cluster.apply.applicable import check_plan, plan_digest, schedule_name
from remat.cluster.apply.asked import Applied
from remat.cluster.apply.cluster_mesh import opened_plan
from remat.cluster.apply.materializing import Materialize, values_digest
from remat.cluster.apply.parts_of_rank import RankParts, rank_parts
from remat.cluster.apply.running import runner_of
from remat.cluster.apply.split_modules import TensorPlan
from remat.cluster.apply.stage_peak import peak_of_rank
from remat.cluster.apply.whole_chain import whole_chain
from remat.graph_capture.errors import PlanError
from remat.ranks.required_group import refuse_fake
from remat.ranks.together import Together
from remat.rewriter.stages.stepping import PipelineStep, StepRunner
from remat.schedules.pipeline.cluster_plan import ClusterFile

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

WHAT = "remat.parallelize"


@dataclass(frozen=True)
class ClusterPart:
    """What one rank has of a model, and what runs its steps.

    Attributes
    ----------
    schedule : ``schedule.step(x, target=y)`` runs forward and backward of the rank's whole batch.
        With a pipeline it drives a schedule of `torch.distributed.pipelining`, which is
        ``schedule.torch_schedule``.
    modules : a module for each stage of this rank, under the names that the model has.
    peak_bytes : predicted, of parameters, gradients, receive buffers and activations of this rank;
        without optimizer states and the batch; None without a pipeline, where `remat.Sharding`
        predicts it. overhead : of recomputation, by path of the block.
    checks : what was compared before anything was trained, in words.
    """

    schedule: StepRunner
    modules: tuple[nn.Module, ...]
    peak_bytes: int | None
    overhead: dict[str, float]
    checks: tuple[str, ...]

    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank, for an optimizer."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The same with the names that they have in the model."""
        return [named for module in self.modules for named in module.named_parameters()]

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for module in self.modules:
            module.zero_grad()


def parallelize(
    model: nn.Module,
    plan: ClusterFile | str | Path,
    mesh: DeviceMesh,
    args: tuple[Any, ...],
    *,
    loss_fn: Callable[..., Any],
    target: Any = None,
    tp_plan: TensorPlan | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    schedule: str = "",
    materialize: Materialize | None = None,
) -> ClusterPart:
    """This rank's part of `model`, which trains as a plan for a cluster says.

    Each block is rewritten to the recomputation that its stage has room for; gradients are those of
    the same wrappers around eager, to the bit. All ranks of the mesh call, with the same model and
    plan. `model` is taken over: its modules become those of the parts, and what this rank lacks is
    freed with it.

    Parameters
    ----------
    model : with the same weights on all ranks; or on the meta device, with `materialize`.
    plan : of `remat plan-cluster`, or the path of its file.
    mesh : of `remat.cluster_mesh`.
    args, target : one microbatch, of [microbatch, ...], for its shapes and dtypes. The whole batch
        that `schedule.step` takes later has as many microbatches as the plan says. Context
        parallel ranks are given the same whole sequences, [microbatch, seq, ...]; each takes its
        own tokens of them, and shares the heads of attention (DeepSpeed Ulysses, 2023,
        https://arxiv.org/abs/2309.14509).
    loss_fn : the mean loss of a microbatch, of the model's result and the target. Gradients are
        those of the mean over microbatches, data parallel ranks and context parallel ranks.
    tp_plan : styles of `torch.distributed.tensor.parallel` by path in the model, such as
        ``{"layers.*.up": ColwiseParallel()}``; a plan with tensor parallel ranks needs it. The
        plan counts borders that are split along the sequence (`SequenceParallel`).
    mp_policy : of `fully_shard`; the plan counts bfloat16 with masters in float32. Left out,
        the model computes in the dtype that it has.
    schedule : another schedule of torch's than the plan's, with as many stages on each rank.
    materialize : of a path and a module there, which is on the meta device: gives each parameter
        and buffer of it storage and values, as by ``module.to_empty(device="cuda")`` and
        ``module.load_state_dict``. It is called for the modules that this rank has, before they are
        split, and for those before the blocks; ranks of one stage have to give the same values.

    Raises
    ------
    PlanError : the plan is for another world, torch, model or microbatch; its blocks do not fit
        here. CaptureError : the model is no chain; a block cannot be captured; context parallel
        ranks cannot run a block, or the loss, on their own tokens.
    AgreementError : ranks have different plans or models, or one of them has failed.
    RewriteError : a rewritten block does not do what eager does.
    """
    refuse_fake(dist.group.WORLD if dist.is_initialized() else None)
    with Together(dist.group.WORLD if dist.is_initialized() else None, WHAT) as ranks:
        plan = opened_plan(plan)
        check_plan(plan, mesh, model, tp_plan, schedule, materialize)
        _require_same(ranks, "plan", plan_digest(plan, schedule), "plan")
        chain = whole_chain(model, plan, args, loss_fn, target)
        _require_same(ranks, "model", values_digest({"": model}), "model")
        name = schedule_name(plan, schedule)
        asked = Applied(
            plan, mesh, args, loss_fn, target, tp_plan or {}, mp_policy, name, materialize
        )
        parts = rank_parts(chain, asked)
        _require_same_stage(ranks, parts)
        parts.shard()
        made = runner_of(parts)
    peak_bytes = peak_of_rank(parts, made.stages) if isinstance(made, PipelineStep) else None
    return ClusterPart(made, parts.modules, peak_bytes, parts.overhead, parts.checks)


def _require_same(ranks: Together, name: str, mine: str, what: str) -> None:
    said = ranks.said_by_all(name, mine)
    others = [str(rank) for rank, found in enumerate(said) if found != said[0]]
    if others:
        raise PlanError(
            f"the {what} of rank {', '.join(others)} is not that of rank 0: give all ranks the "
            f"same {what}, such as by one file that all read, and the same seed"
        )


def _require_same_stage(ranks: Together, parts: RankParts) -> None:
    """Ranks of a stage run the same collectives only if they follow the same schedules."""
    unlike = _unlike_stages(ranks, "stage", parts.asked.rank, parts.digest)
    if unlike:
        raise PlanError(
            f"ranks of stage {unlike} would follow different schedules, as their blocks are "
            "captured differently: build the same model, and pass a microbatch of the same shapes, "
            "on all ranks"
        )
    unlike = _unlike_stages(ranks, "values", parts.asked.rank, parts.values)
    if unlike:
        raise PlanError(
            f"materialize has given ranks of stage {unlike} different values: let all read the "
            "same file, or draw with a seed that depends on the path alone"
        )


def _unlike_stages(ranks: Together, name: str, stage: int, mine: str) -> str:
    """The stages whose ranks say different things."""
    by_stage = dict[str, set[str]]()
    for one in ranks.said_by_all(name, f"{stage} {mine}"):
        number, _, said = one.partition(" ")
        by_stage.setdefault(number, set()).add(said)
    return ", ".join(number for number, said in by_stage.items() if len(said) > 1)
