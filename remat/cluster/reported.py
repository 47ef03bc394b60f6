"""A kept plan of a cluster as a page: its pipeline replayed in torch's own order."""

from __future__ import annotations

from remat.cluster.cluster_screen import mesh_text, states_text
from remat.graph_capture.errors import PlanError
from remat.schedules.pipeline.actions import PipelineAction, RankOrder
from remat.schedules.pipeline.cluster_plan import MAKE_AGAIN, ClusterFile
from remat.schedules.pipeline.page import cluster_page
from remat.schedules.pipeline.replay import PipelineReplay, in_order, replay_pipeline


def page_of(plan: ClusterFile, name: str = "the plan") -> str:
    """The page of a plan.

    Raises
    ------
    PlanError : the plan has no costs of its stages, as those of older releases.
    """
    replay = replay_of(plan, name)
    return cluster_page(plan, replay, mesh_text(plan.parallelism, plan.chunks), states_text(plan))


def replay_of(plan: ClusterFile, name: str = "the plan") -> PipelineReplay:
    """The microbatches of a plan, replayed; without a pipeline they go one after another.

    Raises
    ------
    PlanError : as of `page_of`.
    """
    if not all(stage.costs for stage in plan.stages):
        raise PlanError(
            f"{name} does not say what its stages take, so no step can be drawn. {MAKE_AGAIN}"
        )
    costs = in_order([stage.costs for stage in plan.stages])
    return replay_pipeline(_order(plan), costs, plan.hop_us)


def _order(plan: ClusterFile) -> tuple[RankOrder, ...]:
    mesh = plan.parallelism
    if not mesh.pipeline_parallel_schedule:
        pairs = ((PipelineAction(0, k, i),) for i in range(plan.microbatches) for k in ("F", "B"))
        return (tuple(pairs),)
    # It imports torch, which a plan without a pipeline does not need.
    from remat.cluster.torch_orders import torch_order

    return torch_order(
        mesh.pipeline_parallel_schedule, mesh.pipeline_parallel_degree, plan.microbatches,
        plan.chunks,
    )  # fmt: skip
