"""What a user asks of `remat.cluster.parallelize`, and what follows of it for this rank."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from remat.cluster.apply.cluster_mesh import CP, PP, REPLICATE, SHARD
from remat.cluster.apply.rank_stages import forwards_open, stages_of_rank
from remat.cluster.apply.whole_chain import Materialize, layers_of_stages
from remat.cluster.plan_file import ClusterFile
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle


TensorPlan = Mapping[str, "ParallelStyle"]
"""Styles by path in the model; a part of a path may be a glob, as of `parallelize_module`."""


def split_over_tensor_ranks(
    modules: Mapping[str, nn.Module], mesh: DeviceMesh, tp_plan: TensorPlan
) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

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
    from torch.distributed.tensor import DTensor

    for path, block in blocks.items():
        held = (p for p in block.parameters() if isinstance(p, DTensor))
        # The plan counts a part of the block's weights and work on each rank.
        if not any(place.is_shard() for p in held for place in p.placements):
            raise PlanError(
                f"tp_plan splits no parameter of block {path}, and the plan is for {ranks} tensor "
                "parallel ranks: name its linear layers, such as 'layers.*.up': ColwiseParallel()"
            )


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    shard = SHARD
    if mesh[CP].size() > 1:
        # Context parallel ranks have other tokens of the batch, so states are split over them too.
        shard = f"{SHARD}_{CP}"
        mesh[SHARD, CP]._flatten(shard)
    is_both = mesh[REPLICATE].size() > 1
    return mesh[REPLICATE, shard] if is_both else mesh[shard]


def shard_over_data_ranks(
    part: nn.Module, blocks: Sequence[nn.Module], plan: ClusterFile, mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
) -> None:  # fmt: skip
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    how: dict[str, Any] = {
        "mesh": _data_mesh(mesh), "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "reshard_after_forward": _reshard(plan.parallelism.fsdp_reshard_after_forward),
    }  # fmt: skip
    # Inside out: a module that is wrapped later leaves out what is wrapped already.
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(part, **how)


def _reshard(said: str) -> bool | int:
    return said == "always" if said in ("never", "always") else int(said)


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
        return stages_of_rank(
            self.schedule, self.rank, self.mesh[PP].size(), self.plan.virtual_stages
        )

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Paths of blocks by stage of the model, not of the rank."""
        return layers_of_stages(self.plan)

    @property
    def has_last(self) -> bool:
        return len(self.layers) - 1 in self.stages

    @property
    def is_sharded(self) -> bool:
        ranks = self.mesh[REPLICATE].size() * self.mesh[SHARD].size() * self.mesh[CP].size()
        # `mp_policy` needs it on one rank too: its casts are those of `fully_shard`.
        return ranks > 1 or self.mp_policy is not None

    @property
    def shares_tokens(self) -> bool:
        return self.mesh[CP].size() > 1

    @property
    def cast(self) -> Sharding:
        dtype = None if self.mp_policy is None else self.mp_policy.param_dtype
        if dtype is None:
            return NO_SHARDING
        # As plans for sharded models name the dtype of computations.
        return Sharding("fsdp2", 2, param_dtype=str(dtype).removeprefix("torch."))

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
