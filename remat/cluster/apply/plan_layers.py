"""The blocks of each stage of a plan, in the order of the model."""

from __future__ import annotations

from remat.schedules.pipeline.cluster_plan import ClusterFile


def layers_of_stages(plan: ClusterFile) -> list[tuple[str, ...]]:
    """Paths of the blocks of each stage: the first chunk of each rank, then the second."""
    return [stage.layers[chunk] for chunk in range(plan.chunks) for stage in plan.stages]
