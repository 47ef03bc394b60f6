"""Cuts a model into the stages of this rank, with blocks that follow their place's schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from remat.cluster.applying import schedule_name
from remat.cluster.cluster_mesh import PP, REPLICATE, SHARD, TP
from remat.cluster.head_bytes import head_bytes
from remat.cluster.plan_layers import layers_of_stages
from remat.cluster.rank_orders import chunks_open, stages_of_rank
from remat.cluster.running import runner_of
from remat.cluster.split_modules import (
    TensorPlan,
    require_split,
    shard_over_data_ranks,
    split_over_tensor_ranks,
)
from remat.cluster.stage_blocks import StageBlocks, choose, traced_blocks
from remat.cluster.stage_peak import BEFORE, NO_BYTES, BlockBytes
from remat.cluster.whole_chain import WholeChain
from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import CaptureError, PlanError
from remat.graph_capture.over_ranks.dtensors import local_part
from remat.graph_capture.tracing.mixed_precision import inputs_cast, parameters_cast
from remat.rewriter.stages.border import Arrival, Before, Behind, arrival_of
from remat.rewriter.stages.model_part import ModelPart, StageRun, model_part
from remat.rewriter.stages.stepping import StepRunner
from remat.schedules.pipeline.cluster_plan import ClusterFile

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class RankParts:
    """The stages of this rank before they are wrapped.

    Attributes
    ----------
    indices : of the stages. chosen : the blocks of all of them. given : to the first block.
    args : a microbatch. gradient_bytes : of whole gradients, by block and before them. behind : of
        what follows the blocks. whole_bytes : of parameters that `fully_shard` gathers. overhead,
        checks : as of `ClusterPart`.
    """

    plan: ClusterFile
    rank: int
    name: str
    indices: tuple[int, ...]
    modules: tuple[ModelPart, ...]
    chosen: StageBlocks
    given: Arrival
    args: tuple[Any, ...]
    gradient_bytes: dict[str, int]
    behind: BlockBytes
    whole_bytes: int
    overhead: dict[str, float]
    checks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The same on ranks whose blocks follow the same schedules."""
        steps = [f"{path} {one.steps}" for path, one in self.chosen.schedules.items()]
        return hashlib.sha256("\n".join(steps).encode()).hexdigest()

    def wrapped(
        self, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy | None
    ) -> StepRunner:
        """The runner of a step, once modules are sharded over data parallel ranks."""
        if is_sharded(mesh, mp_policy):
            for part in self.modules:
                shard_over_data_ranks(part, part._remat_run.blocks, self.plan, mesh, mp_policy)
        return runner_of(self, mesh)


def is_sharded(mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy | None) -> bool:
    """Whether parts are wrapped by `fully_shard`: for data parallel ranks, or for its casts."""
    return mesh[REPLICATE].size() * mesh[SHARD].size() > 1 or mp_policy is not None


def rank_parts(
    chain: WholeChain, plan: ClusterFile, mesh: DeviceMesh, args: tuple[Any, ...],
    loss_fn: Callable[..., Any], target: Any, tp_plan: TensorPlan,
    mp_policy: MixedPrecisionPolicy | None, schedule: str, *, eager: bool = False,
) -> RankParts:  # fmt: skip
    """The stages of this rank, each block rewritten.

    Parameters
    ----------
    eager : leave blocks as they are.

    Raises
    ------
    PlanError, CaptureError, RewriteError : as of `parallelize`.
    """
    name = schedule_name(plan, schedule)
    rank, pp = mesh.get_local_rank(PP), mesh[PP].size()
    indices = stages_of_rank(name, rank, pp, plan.chunks)
    layers = layers_of_stages(plan)
    paths = [path for index in indices for path in layers[index]]
    own = {path: chain.blocks[path] for path in paths}
    cast = _cast_as(mp_policy)
    args, _ = inputs_cast(args, {}, cast)
    cutter = _Cutter(chain, args, loss_fn, len(layers))
    if mesh[TP].size() > 1:
        split_over_tensor_ranks({**chain.before, **chain.behind, **own}, mesh[TP], tp_plan)
        require_split(own, mesh[TP].size())
    with parameters_cast(chain.model, cast):
        given = cutter.arrival()
        _require_border(given, plan)
        has_gradient = any(p.requires_grad for m in chain.before.values() for p in m.parameters())
        first = next(iter(chain.blocks))
        chosen = traced_blocks(own, plan, given, first, has_input_gradient=has_gradient)
        choose(chosen, plan, rank, _in_flight(plan, name, rank))
        replaced = own if eager else chosen.rewritten()
        cutter.try_behind(given, target, is_here=len(layers) - 1 in indices)
        is_last = len(layers) - 1 in indices
        behind = head_bytes(chain.behind, cutter.behind, given, loss_fn, target) if is_last else NO_BYTES
        held = _held_bytes({BEFORE: chain.before} | {path: {path: b} for path, b in own.items()})
    whole = sum(held.values()) - (0 if 0 in indices else held[BEFORE])
    modules = tuple(cutter.part(i, layers[i], replaced, given) for i in indices)
    overhead = {
        path: chosen.options[path].extra_us / one.graph.time_us
        for path, one in chosen.traced.items()
    }
    checks = (
        "plan and model are the same on all ranks",
        f"{len({one.steps for one in chosen.schedules.values()})} distinct schedules of {len(own)} blocks have "
        "eager's bits",
    )
    wider = _gradient_widening(mp_policy)
    gradients = {path: size * wider for path, size in held.items()}
    whole_bytes = (whole + behind.gradients) * is_sharded(mesh, mp_policy)
    behind = replace(behind, gradients=behind.gradients * wider)
    return RankParts(
        plan, rank, name, indices, modules, chosen, given, args, gradients, behind, whole_bytes,
        overhead, checks,
    )  # fmt: skip


def _gradient_widening(mp_policy: MixedPrecisionPolicy | None) -> int:
    """How many times as large a gradient is that `fully_shard` sums over microbatches."""
    if mp_policy is None or mp_policy.param_dtype is None or mp_policy.reduce_dtype is None:
        return 1
    return max(mp_policy.reduce_dtype.itemsize // mp_policy.param_dtype.itemsize, 1)


def _in_flight(plan: ClusterFile, name: str, rank: int) -> float:
    """Microbatches of all of a rank's blocks that are open at once."""
    if name == plan.parallelism.pipeline_parallel_schedule:
        return plan.stages[rank].microbatches_in_flight
    found = chunks_open(
        name, plan.parallelism.pipeline_parallel_degree, plan.microbatches, plan.chunks
    )
    return found[rank] / plan.chunks


def _held_bytes(groups: Mapping[str, Mapping[str, nn.Module]]) -> dict[str, int]:
    """Bytes of the parameters of each group of modules, as they are computed with."""
    return {
        name: sum(
            local_part(p).numel() * p.element_size()
            for module in modules.values() for p in module.parameters() if p.requires_grad
        )
        for name, modules in groups.items()
    }  # fmt: skip


class _Cutter:
    """The ends of a model, cut off before its modules are split or sharded."""

    def __init__(
        self, chain: WholeChain, args: tuple[Any, ...], loss_fn: Callable[..., Any], stages: int
    ) -> None:
        self.chain, self.args, self.loss_fn, self.stages = chain, args, loss_fn, stages
        blocks = list(chain.blocks.values())
        self.before = Before(chain.model, blocks[0])
        self.behind = Behind(chain.model, blocks, list(chain.behind.values()), args)

    def arrival(self) -> Arrival:
        """What the first block is called with."""
        first = next(iter(self.chain.blocks))
        return arrival_of(self.before, self.chain.model, self.args, first)

    def try_behind(self, given: Arrival, target: Any, *, is_here: bool) -> None:
        """Run what follows the last block once.

        Raises
        ------
        CaptureError : it reads the batch, which a last stage does not have; or the loss is none.
        """
        if not is_here:
            return
        run = StageRun(None, (), self.behind, given, self.loss_fn)
        why = "reads what comes before the blocks, which the last stage does not have"
        try:
            with torch.no_grad():
                loss = run((torch.zeros_like(given.border),), target)
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(f"what follows the last block {why}, or fails: {error}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_meta:
            raise CaptureError(
                f"loss_fn returns {type(loss).__name__} and no loss of one number on the device: "
                f"or what follows the last block {why}"
            )

    def part(
        self, index: int, paths: tuple[str, ...], replaced: Mapping[str, nn.Module], given: Arrival
    ) -> ModelPart:
        """One stage."""
        is_first, is_last = index == 0, index == self.stages - 1
        ends = (self.chain.before if is_first else {}) | (self.chain.behind if is_last else {})
        blocks = {path: replaced[path] for path in paths}
        run = StageRun(
            self.before if is_first else None, tuple(blocks.values()),
            self.behind if is_last else None, given, self.loss_fn,
        )  # fmt: skip
        return model_part(self.chain.model, {**ends, **blocks}, run)


def _cast_as(mp_policy: MixedPrecisionPolicy | None) -> Sharding:
    """The dtype of computations, as plans for sharded models name it."""
    dtype = None if mp_policy is None else mp_policy.param_dtype
    if dtype is None:
        return NO_SHARDING
    return Sharding("fsdp2", 2, param_dtype=str(dtype).removeprefix("torch."))


def _require_border(given: Arrival, plan: ClusterFile) -> None:
    """Raise `PlanError` where blocks read another shape or dtype than was planned."""
    border = local_part(given.border)
    graph = plan.graphs[0]
    name = graph.ops[0].outputs[0]
    planned = graph.value_by_name[name]
    dtype = str(border.dtype).removeprefix("torch.")
    if (tuple(border.shape), dtype) == (planned.shape, planned.dtype):
        return
    raise PlanError(
        f"blocks read {dtype}{list(border.shape)} here, and the plan is for {planned.dtype}"
        f"{list(planned.shape)}: pass one microbatch of "
        f"{plan.parallelism.pipeline_parallel_microbatch_size} x {plan.seq} in args, compute in "
        f"{planned.dtype} (mp_policy, or the model's own dtype), and let tp_plan split borders "
        "along the sequence"
    )
