"""One plan for a cluster, from a factory to a file and a screen, and the part of it on a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.cluster.apply.cluster_mesh import cluster_mesh
    from remat.cluster.apply.parallelize import ClusterPart, parallelize

__all__ = ["ClusterPart", "cluster_mesh", "parallelize"]


def __getattr__(name: str) -> Any:
    # Late, so that the command line can import what is free of torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from remat.cluster.apply import cluster_mesh, parallelize

    return getattr(cluster_mesh if name == "cluster_mesh" else parallelize, name)
