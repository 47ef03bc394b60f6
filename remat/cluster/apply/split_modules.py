"""Tensor and data parallelism of a stage's modules, by torch's own functions and a user's plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from remat.cluster.apply.cluster_mesh import CP, REPLICATE, SHARD
from remat.graph_capture.errors import PlanError
from remat.schedules.pipeline.cluster_plan import ClusterFile

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

TensorPlan = Mapping[str, "ParallelStyle"]
"""Styles by path in the model; a part of a path may be a glob, as of `parallelize_module`."""


def split_over_tensor_ranks(
    modules: Mapping[str, nn.Module], mesh: DeviceMesh, tp_plan: TensorPlan
) -> None:
    """Split modules, given by path, over the ranks of a one-dimensional mesh."""
    from torch.distributed.tensor.parallel import parallelize_module

    for path, module in modules.items():
        inside = _styles_for(path, tp_plan)
        if inside:
            parallelize_module(module, mesh, inside)


def _styles_for(path: str, tp_plan: TensorPlan) -> Any:
    """What the plan says of a module: a style for it, or styles by path inside of it."""
    own = path.split(".")
    found: dict[str, ParallelStyle] = {}
    for key, style in tp_plan.items():
        parts = key.split(".")
        if len(parts) < len(own) or not all(map(fnmatch.fnmatchcase, own, parts)):
            continue
        if len(parts) == len(own):
            return style
        found[".".join(parts[len(own) :])] = style
    return found


def require_split(blocks: Mapping[str, nn.Module], ranks: int) -> None:
    """Raise `PlanError` for a block that every tensor parallel rank has as a whole."""
    from torch.distributed.tensor import DTensor

    for path, block in blocks.items():
        held = (p for p in block.parameters() if isinstance(p, DTensor))
        if not any(place.is_shard() for p in held for place in p.placements):
            raise PlanError(
                f"tp_plan splits no parameter of block {path}, and the plan is for {ranks} tensor "
                "parallel ranks: name its linear layers, such as 'layers.*.up': ColwiseParallel()"
            )


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of ranks with other data: both of them where there are replicas.

    Context parallel ranks have other tokens, so that states are split over them too.
    """
    shard = SHARD
    if mesh[CP].size() > 1:
        shard = f"{SHARD}_{CP}"
        mesh[SHARD, CP]._flatten(shard)
    is_both = mesh[REPLICATE].size() > 1
    return mesh[REPLICATE, shard] if is_both else mesh[shard]


def shard_over_data_ranks(
    part: nn.Module, blocks: Sequence[nn.Module], plan: ClusterFile, mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
) -> None:  # fmt: skip
    """Wrap each block, then the part, by `fully_shard`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    how: dict[str, Any] = {
        "mesh": data_mesh(mesh), "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "reshard_after_forward": _reshard(plan.parallelism.fsdp_reshard_after_forward),
    }  # fmt: skip
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(part, **how)


def _reshard(said: str) -> bool | int:
    return said == "always" if said in ("never", "always") else int(said)
