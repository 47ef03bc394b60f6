"""The mesh of devices that a plan for a cluster is for, and what a rank of it has of the plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from remat.cluster.apply.whole_chain import Materialize, layers_of_stages
from remat.cluster.plan_file import ClusterFile, read_cluster_plan, require_world
from remat.cluster.stepping import forwards_open, reshard, stages_of_rank
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import PlanError
from remat.graph_capture.files import read_contents

PP, _REPLICATE, _SHARD, CP, TP = "pp", "dp_replicate", "dp_shard", "cp", "tp"
DIMENSIONS = (PP, _REPLICATE, _SHARD, CP, TP)
"""Of a mesh, in torchtitan's order: neighbours in the last one are nearest."""


def opened_plan(plan: ClusterFile | str | Path) -> ClusterFile:
    """A plan as it is, or read from a file; raises `FileError` or `PlanError`."""
    if isinstance(plan, ClusterFile):
        return plan
    if not isinstance(plan, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"pass the path of a file that remat cluster has written: a {type(plan).__name__} is "
            "not a plan for a cluster"
        )
    return read_cluster_plan(read_contents(plan), str(plan))


def cluster_mesh(plan: ClusterFile | str | Path, device_type: str = "") -> DeviceMesh:
    """The mesh of a plan, over all ranks of the default process group.

    Parameters
    ----------
    plan : of `remat cluster`, or the path of its file.
    device_type : ``cuda`` or ``cpu``; left out, CUDA where there is some.

    Returns
    -------
    A `DeviceMesh` with the dimensions pp, dp_replicate, dp_shard, cp and tp, of which each has the
    plan's degree, 1 included.

    Raises
    ------
    PlanError : the plan is for another number of ranks, or there is no process group.
    """
    plan = opened_plan(plan)
    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            "start this process with torchrun --nproc-per-node N, and call "
            f"torch.distributed.init_process_group first: the plan is for {plan.gpus} ranks, and "
            "it is in no group"
        )
    require_world(plan, dist.get_world_size())
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, plan.parallelism.degrees, mesh_dim_names=DIMENSIONS)


# What the mesh splits: modules over tensor parallel ranks, states over data parallel ones.


TensorPlan = Mapping[str, ParallelStyle]
"""Styles by path in the model; a part of a path may be a glob, as of `parallelize_module`."""


def split_over_tensor_ranks(
    modules: Mapping[str, nn.Module], mesh: DeviceMesh, tp_plan: TensorPlan
) -> None:
    for path, module in modules.items():
        inside = _styles_for(path, tp_plan)
        if inside:
            parallelize_module(module, mesh, inside)


def _styles_for(path: str, tp_plan: TensorPlan) -> Any:
    """A style for the module at `path`, or styles by path inside of it."""
    own = path.split(".")
    found: dict[str, ParallelStyle] = {}
    for key, style in tp_plan.items():
        parts = key.split(".")
        # Keys are paths in the model, and modules are split one by one.
        if len(parts) < len(own) or not all(map(fnmatch.fnmatchcase, own, parts)):
            continue
        if len(parts) == len(own):
            return style
        found[".".join(parts[len(own) :])] = style
    return found


def require_split_blocks(blocks: Mapping[str, nn.Module], ranks: int) -> None:
    for path, block in blocks.items():
        held = (p for p in block.parameters() if isinstance(p, DTensor))
        # The plan counts a part of the block's weights and work on each rank.
        if not any(place.is_shard() for p in held for place in p.placements):
            raise PlanError(
                f"name the linear layers of block {path} in tp_plan, such as 'layers.*.up': "
                f"ColwiseParallel(). The plan is for {ranks} tensor parallel ranks, and tp_plan "
                "splits no parameter of the block"
            )


def shard_over_data_ranks(
    part: nn.Module, blocks: Sequence[nn.Module], plan: ClusterFile, mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
) -> None:  # fmt: skip

    kept, shard = plan.parallelism.fsdp_reshard_after_forward, _SHARD
    if mesh[CP].size() > 1:
        # Context parallel ranks have other tokens of the batch, so states are split over them too.
        shard = f"{_SHARD}_{CP}"
        mesh[_SHARD, CP]._flatten(shard)
    how: dict[str, Any] = {
        "mesh": mesh[_REPLICATE, shard] if mesh[_REPLICATE].size() > 1 else mesh[shard],
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "reshard_after_forward": kept == "always" if kept in ("never", "always") else int(kept),
    }  # fmt: skip
    # Inside out: a module that is wrapped later leaves out what is wrapped already.
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(part, **how)
    part.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(part: nn.Module, *_: Any) -> None:
    # An evaluation would leave weights whole: a step would read them after an update, and
    # `zero_grad` would not find the gradients of the shards.
    if not torch.is_grad_enabled():
        reshard(part)


@dataclass(frozen=True)
class Applied:
    """A plan and what it is applied with; see `remat.cluster.parallelize`."""

    plan: ClusterFile
    mesh: DeviceMesh
    args: tuple[Any, ...]
    loss_fn: Callable[..., Any]
    target: Any
    tp_plan: TensorPlan
    mp_policy: MixedPrecisionPolicy | None
    schedule: str
    materialize: Materialize | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the pipeline."""
        return self.mesh.get_local_rank(PP)

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of this rank, in the order of the model."""
        pp = self.mesh[PP].size()
        return stages_of_rank(self.schedule, self.rank, pp, self.plan.virtual_stages)

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Paths of blocks by stage of the model, not of the rank."""
        return layers_of_stages(self.plan)

    @property
    def has_last(self) -> bool:
        return len(self.layers) - 1 in self.stages

    @property
    def is_sharded(self) -> bool:
        ranks = self.mesh[_REPLICATE].size() * self.mesh[_SHARD].size() * self.mesh[CP].size()
        # `mp_policy` needs it on one rank too: its casts are those of `fully_shard`.
        return ranks > 1 or self.mp_policy is not None

    @property
    def shares_tokens(self) -> bool:
        return self.mesh[CP].size() > 1

    @property
    def data_groups(self) -> list[Any]:
        """Of ranks that have other tokens, in turn."""
        of_data = (self.mesh[name] for name in (_REPLICATE, _SHARD, CP))
        return [mesh.get_group() for mesh in of_data if mesh.size() > 1]

    @property
    def is_whole(self) -> bool:
        """Whether this rank runs all of the model's forward, on all tokens of its batch."""
        return self.mesh[PP].size() == 1 and not self.shares_tokens

    @property
    def cast(self) -> Sharding:
        dtype = None if self.mp_policy is None else self.mp_policy.param_dtype
        if dtype is None:
            return NO_SHARDING
        # As plans for sharded models name the dtype of computations.
        return Sharding("fsdp2", 2, param_dtype=str(dtype).removeprefix("torch."))

    @property
    def cast_of_blocks(self) -> Sharding:
        is_cast = self.mp_policy is not None and self.mp_policy.cast_forward_inputs
        return self.cast if is_cast else NO_SHARDING

    @property
    def widening(self) -> int:
        """How many times as large a gradient is that `fully_shard` sums over microbatches."""
        policy = self.mp_policy
        if policy is None or policy.param_dtype is None or policy.reduce_dtype is None:
            return 1
        return max(policy.reduce_dtype.itemsize // policy.param_dtype.itemsize, 1)

    @property
    def in_flight(self) -> float:
        """Microbatches of all of this rank's blocks that are open at once."""
        plan = self.plan
        if self.schedule == plan.parallelism.pipeline_parallel_schedule:
            return plan.stages[self.rank].microbatches_in_flight
        # The user runs another schedule than the planned one.
        pp = plan.parallelism.pipeline_parallel_degree
        found = forwards_open(self.schedule, pp, plan.microbatches, plan.virtual_stages)
        return found[self.rank] / plan.virtual_stages
