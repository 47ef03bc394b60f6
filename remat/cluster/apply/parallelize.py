"""Applies a plan for a cluster to a model: `remat.cluster.parallelize`.

All that runs is torch's: `parallelize_module`, `fully_shard` and the schedules of
`torch.distributed.pipelining`, whose stages have blocks that follow the plan's recomputation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining.schedules import get_schedule_class

from remat.cluster import stepping
from remat.cluster.apply.cluster_mesh import DIMENSIONS, PP, Applied, TensorPlan, opened_plan
from remat.cluster.apply.split_backward import split_backward
from remat.cluster.apply.stage_parts import RankParts, rank_parts
from remat.cluster.apply.stage_peak import peak_of_rank
from remat.cluster.apply.whole_chain import Materialize, state_by_path, whole_chain
from remat.cluster.plan_file import MAKE_AGAIN, ClusterFile, require_world
from remat.cluster.replayed_plan import ONE_STAGE, torch_order
from remat.graph_capture.errors import PlanError, RewriteError, ScheduleError
from remat.graph_capture.tracing.fake_tensors import has_storage
from remat.ranks.collective_call import CollectiveCall, values_digest
from remat.ranks.same_order import refuse_fake
from remat.rewriter.user_module.module import SharedState


def _check_plan(
    plan: ClusterFile, mesh: DeviceMesh, model: nn.Module, tp_plan: TensorPlan | None,
    name: str, materialize: Materialize | None,
) -> None:  # fmt: skip
    if plan.versions.torch != str(torch.__version__):
        raise PlanError(
            f"{MAKE_AGAIN}: the plan is for torch {plan.versions.torch}, and this is "
            f"{torch.__version__}"
        )
    _check_mesh(plan, mesh)
    if materialize is not None and not callable(materialize):
        raise PlanError(
            "pass materialize as a function of a path and a module, such as lambda path, module: "
            f"load(path, module.to_empty(device='cuda')), not a {type(materialize).__name__}"
        )
    _check_model(model, is_materialized=materialize is not None)
    tp = plan.parallelism.tensor_parallel_degree
    if tp > 1 and not tp_plan:
        raise PlanError(
            f"pass tp_plan, such as {{'layers.*.up': ColwiseParallel(), ...}}: the plan is for "
            f"{tp} tensor parallel ranks, and needs to know which layers they share"
        )
    _check_schedule(plan, name)


def _check_mesh(plan: ClusterFile, mesh: DeviceMesh) -> None:
    require_world(plan, mesh.size())
    wanted = dict(zip(DIMENSIONS, plan.parallelism.degrees, strict=True))
    names = mesh.mesh_dim_names or ()
    found = {name: mesh.size(i) for i, name in enumerate(names)}
    if tuple(names) != DIMENSIONS or found != wanted:
        raise PlanError(
            f"make the mesh with remat.cluster.cluster_mesh(plan): it is {found}, and the plan's "
            f"is {wanted}"
        )


def _check_model(model: nn.Module, *, is_materialized: bool) -> None:
    if any(isinstance(module, SharedState) for module in model.modules()):
        raise PlanError("parallelize the original model: a part of this one already follows a plan")
    if not has_storage(model) and not is_materialized:
        raise PlanError(
            "pass materialize=, a function that gives a module storage and values, or build the "
            f"model with storage on each rank, with the same seed: this {type(model).__name__} is "
            "on the meta device and cannot train"
        )


def _check_schedule(plan: ClusterFile, name: str) -> None:
    pp = plan.parallelism.pipeline_parallel_degree
    if pp == 1:
        return
    if plan.microbatches < pp:
        raise PlanError(
            f"plan again with a larger --batch, or --pp {plan.microbatches}: {plan.microbatches} "
            f"microbatches are fewer than {pp} stages, which then wait for each other"
        )
    if (name in ONE_STAGE) != (plan.virtual_stages == 1):
        raise PlanError(
            f"choose {', '.join(ONE_STAGE)} for one stage on each rank, or plan with "
            f"--virtual-stages 2 or more for others: schedule {name} is not for "
            f"{plan.virtual_stages}, as planned"
        )
    try:
        torch_order(name, pp, plan.microbatches, plan.virtual_stages)
    except ScheduleError as error:
        raise PlanError(str(error)) from error


def _runner_of(parts: RankParts) -> stepping.PipelineStep | stepping.PlainStep:
    plan, name = parts.asked.plan, parts.asked.schedule
    batches = stepping.Batches(parts.asked.args, parts.asked.target, plan.microbatches)
    of_loss = stepping.OfLoss(list(parts.of_loss.values()), parts.asked.data_groups)
    if parts.asked.mesh[PP].size() == 1:
        each = plan.gradients == "each"
        return stepping.PlainStep(parts.modules[0], batches, of_loss, reduce_each=each)
    stages = [_stage_of_torch(parts, i) for i in range(len(parts.modules))]
    kind: Any = get_schedule_class(name)
    is_one = name in ONE_STAGE
    given = stages[0] if is_one else stages
    # The last stage has computed its loss; torch's own scale would be of older gradients too.
    schedule = kind(
        given, n_microbatches=plan.microbatches, scale_grads=False,
        loss_fn=lambda loss, _: stepping.of_mean(loss, plan.microbatches),
    )  # fmt: skip
    # Now that torch has the order of the step, it says how many buffers are in use at once.
    for stage in stages:
        at, m = stage.stage_index, plan.microbatches
        if is_one:
            rings = stepping.one_stage_rings(name, at, stage.num_stages, m)
        else:
            actions = schedule.pipeline_order_with_comms[stage.group_rank]
            keeps = name in stepping.ZERO_BUBBLE and stage.dw_builder is None
            rings = stepping.rings_of(actions, at, m, keeps_inputs=keeps)
        stage.input_buffers, stage.gradient_buffers = rings
    return stepping.PipelineStep(schedule, stages, batches, of_loss)


def _stage_of_torch(parts: RankParts, at: int) -> stepping.RingStage:
    asked, border = parts.asked, parts.given.border
    index, stages = asked.stages[at], len(asked.layers)
    # Torch would otherwise run a forward and a backward to learn these.
    received = torch.empty_like(border, device="meta").requires_grad_()
    loss = torch.empty((), dtype=torch.float32, device="meta")
    # A rewritten block is one autograd node: torch would run all of it for I, and again for W.
    is_split = asked.schedule in stepping.ZERO_BUBBLE and parts.chosen.is_rewritten
    split = split_backward(parts.modules[at]) if is_split else None
    made = stepping.RingStage(
        parts.modules[at], index, stages, border.device,
        input_args=parts.args if index == 0 else (received,),
        output_args=(loss if index == stages - 1 else received,), group=asked.mesh.get_group(PP),
        dw_builder=None if split is None else split.dw_builder,
    )  # fmt: skip
    made.border = torch.empty_like(border, device="meta")
    if split is not None:
        made.split = split.live
    return made


@dataclass(frozen=True)
class ClusterPart:
    """What one rank has of a model, and what runs its steps.

    Attributes
    ----------
    schedule : ``schedule.step(x, target=y)`` adds the gradients of the rank's whole batch, and
        ``schedule.eval(x, target=y, losses=losses)`` has its losses alone, in training or not.
        With a pipeline it drives a schedule of `torch.distributed.pipelining`, which is
        ``schedule.torch_schedule``.
    modules : a module for each stage of this rank, under the names that the model has.
    peak_bytes : predicted, of parameters, gradients, receive buffers and activations of this rank;
        without optimizer states and the batch; None without a pipeline, where `remat.Sharding`
        predicts it. overhead : of recomputation, by path of the block.
    checks : what was compared before anything was trained, in words.
    of_loss : parameters that the loss has of its own, where this rank computes it.
    """

    schedule: stepping.PipelineStep | stepping.PlainStep
    modules: tuple[nn.Module, ...]
    peak_bytes: int | None
    overhead: dict[str, float]
    checks: tuple[str, ...]
    of_loss: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RewriteError(
            "copy the modules, copy.deepcopy(part.modules): a part belongs to groups of processes, "
            "which have no copies"
        )

    def parameters(self) -> list[Tensor]:
        """Of all stages of this rank and of its loss, for an optimizer."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The same with the names that they have in the model, or in `of_loss`."""
        of_model = [named for module in self.modules for named in module.named_parameters()]
        return [*of_model, *self.of_loss.items()]

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for module in self.modules:
            # What a forward without a backward has gathered would hide the shards.
            stepping.reshard(module)
            module.zero_grad()
        for parameter in self.of_loss.values():
            parameter.grad = None


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
    plan. `model` is taken over: its modules become those of the parts, what this rank lacks is
    freed with it, and `use_cache` of a config of transformers' is switched off.

    Parameters
    ----------
    model : with the same weights on all ranks; or on the meta device, with `materialize`.
    plan : of `remat cluster`, or the path of its file.
    mesh : of `remat.cluster.cluster_mesh`.
    args, target : one microbatch, of [microbatch, ...], for its shapes and dtypes. The whole batch
        that `schedule.step` takes later has as many microbatches as the plan says. Context
        parallel ranks are given the same whole sequences, [microbatch, seq, ...]; each takes its
        own tokens of them, and shares the heads of attention (DeepSpeed Ulysses, 2023,
        https://arxiv.org/abs/2309.14509).
    loss_fn : of the model's result and the target of a microbatch. Gradients are those of the mean
        over microbatches and data parallel ranks, as one rank has it: sums and means that the loss
        takes over tokens are over those of all context parallel ranks. Trained parameters of its
        own are among those of the part.
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
    world = dist.group.WORLD if dist.is_initialized() else None
    # A fake group has no other ranks to meet.
    refuse_fake(world)
    # An error of one rank ends all of them, before any waits for it in a collective of torch's.
    with CollectiveCall(world, "remat.cluster.parallelize") as ranks:
        plan = opened_plan(plan)
        name = schedule or plan.parallelism.pipeline_parallel_schedule
        _check_plan(plan, mesh, model, tp_plan, name, materialize)
        digest = hashlib.sha256(plan.to_json() + schedule.encode()).hexdigest()
        _require_same(ranks, "plan", digest)
        chain = whole_chain(model, plan, args, loss_fn, target)
        with_loss = {"": model, "loss_fn": nn.ParameterList(chain.of_loss.values())}
        _require_same(ranks, "model", values_digest(state_by_path(with_loss)))
        asked = Applied(
            plan, mesh, args, loss_fn, target, tp_plan or {}, mp_policy, name, materialize
        )
        parts = rank_parts(chain, asked)
        _require_same_stage(ranks, parts)
        parts.shard()
        made = _runner_of(parts)
    peak_bytes = (
        peak_of_rank(parts, made.stages) if isinstance(made, stepping.PipelineStep) else None
    )
    return ClusterPart(made, parts.modules, peak_bytes, parts.overhead, parts.checks, parts.of_loss)


def _require_same(ranks: CollectiveCall, what: str, mine: str) -> None:
    _, others = ranks.unlike({what: mine})
    if others:
        raise PlanError(
            f"give all ranks the same {what}, such as from one file that all read, and the same "
            f"seed: the {what} of rank {others} is not that of rank 0"
        )


def _require_same_stage(ranks: CollectiveCall, parts: RankParts) -> None:
    # Ranks of a stage run the same collectives only if they follow the same schedules.
    if unlike := _unlike_stages(ranks, "stage", parts.asked.rank, parts.digest):
        raise PlanError(
            "build the same model, and pass a microbatch of the same shapes, on all ranks: ranks "
            f"of stage {unlike} would follow different schedules, as their blocks are captured "
            "differently"
        )
    if unlike := _unlike_stages(ranks, "values", parts.asked.rank, parts.values):
        raise PlanError(
            "let all ranks read the same file, or draw with a seed that depends only on the path: "
            f"materialize gave ranks of stage {unlike} different values"
        )


def _unlike_stages(ranks: CollectiveCall, name: str, stage: int, mine: str) -> str:
    by_stage = dict[str, set[str]]()
    for one in ranks.gathered_texts(name, f"{stage} {mine}"):
        number, _, said = one.partition(" ")
        by_stage.setdefault(number, set()).add(said)
    return ", ".join(number for number, said in by_stage.items() if len(said) > 1)
