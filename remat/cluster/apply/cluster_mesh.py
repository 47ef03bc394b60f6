"""The mesh of devices that a plan for a cluster is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from remat.cluster.plan_file import ClusterFile, read_cluster_plan, require_world
from remat.graph_capture.errors import PlanError
from remat.graph_capture.files import read_contents

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PP, REPLICATE, SHARD, CP, TP = "pp", "dp_replicate", "dp_shard", "cp", "tp"
DIMENSIONS = (PP, REPLICATE, SHARD, CP, TP)
"""Of a mesh, in torchtitan's order: neighbours in the last one are nearest."""


def opened_plan(plan: ClusterFile | str | Path) -> ClusterFile:
    """A plan as it is, or read from a file; raises `FileError` or `PlanError`."""
    if isinstance(plan, ClusterFile):
        return plan
    if not isinstance(plan, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"no plan for a cluster, but {type(plan).__name__}: pass the path of a file that "
            "remat cluster has written"
        )
    return read_cluster_plan(read_contents(plan), str(plan))


def degrees_of(plan: ClusterFile) -> dict[str, int]:
    """In the order of `DIMENSIONS`."""
    degrees = plan.parallelism
    return {
        PP: degrees.pipeline_parallel_degree, REPLICATE: degrees.data_parallel_replicate_degree,
        SHARD: degrees.data_parallel_shard_degree, CP: degrees.context_parallel_degree,
        TP: degrees.tensor_parallel_degree,
    }  # fmt: skip


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
            f"the plan is for {plan.gpus} ranks, and this process is in no group: start it with "
            f"torchrun --nproc-per-node N, and call torch.distributed.init_process_group first"
        )
    require_world(plan, dist.get_world_size())
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, tuple(degrees_of(plan).values()), mesh_dim_names=DIMENSIONS)
