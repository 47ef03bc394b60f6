"""What a user asks of `remat.parallelize`, and what follows of it for this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remat.cluster.apply.cluster_mesh import CP, PP, REPLICATE, SHARD
from remat.cluster.apply.materializing import Materialize
from remat.cluster.apply.plan_layers import layers_of_stages
from remat.cluster.apply.rank_orders import chunks_open, stages_of_rank
from remat.cluster.apply.split_modules import TensorPlan
from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.schedules.pipeline.cluster_plan import ClusterFile

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Applied:
    """A plan and what it is applied with; see `remat.parallelize`.

    Attributes
    ----------
    schedule : torch's name of it.
    """

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
        """In the pipeline."""
        return self.mesh.get_local_rank(PP)

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of this rank, in the order of the model."""
        return stages_of_rank(self.schedule, self.rank, self.mesh[PP].size(), self.plan.chunks)

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Paths of the blocks of each stage of the model."""
        return layers_of_stages(self.plan)

    @property
    def has_last(self) -> bool:
        """Whether this rank has the end of the model."""
        return len(self.layers) - 1 in self.stages

    @property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` wraps parts: over ranks with other data, or for its casts."""
        ranks = self.mesh[REPLICATE].size() * self.mesh[SHARD].size() * self.mesh[CP].size()
        return ranks > 1 or self.mp_policy is not None

    @property
    def shares_tokens(self) -> bool:
        """Whether context parallel ranks share each sequence."""
        return self.mesh[CP].size() > 1

    @property
    def cast(self) -> Sharding:
        """The dtype of computations, as plans for sharded models name it."""
        dtype = None if self.mp_policy is None else self.mp_policy.param_dtype
        if dtype is None:
            return NO_SHARDING
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
        pp = plan.parallelism.pipeline_parallel_degree
        found = chunks_open(self.schedule, pp, plan.microbatches, plan.chunks)
        return found[self.rank] / plan.chunks
