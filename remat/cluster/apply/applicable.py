"""What is looked at before a plan for a cluster is applied: versions, degrees, words."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from remat.cluster.apply.cluster_mesh import DIMENSIONS, degrees_of
from remat.cluster.apply.materializing import Materialize
from remat.cluster.apply.split_modules import TensorPlan
from remat.cluster.torch_orders import ONE_STAGE, torch_order
from remat.graph_capture.errors import PlanError, ScheduleError
from remat.graph_capture.tracing.without_storage import has_storage
from remat.rewriter.user_module.shared_state import SharedState
from remat.schedules.pipeline.cluster_plan import MAKE_AGAIN, ClusterFile, require_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_plan(
    plan: ClusterFile, mesh: DeviceMesh, model: nn.Module, tp_plan: TensorPlan | None,
    schedule: str, materialize: Materialize | None,
) -> None:  # fmt: skip
    """Raise `PlanError` for what cannot be applied here."""
    if plan.versions.torch != str(torch.__version__):
        raise PlanError(
            f"the plan is for torch {plan.versions.torch}, and this is {torch.__version__}. "
            f"{MAKE_AGAIN}"
        )
    _check_mesh(plan, mesh)
    if materialize is not None and not callable(materialize):
        raise PlanError(
            f"materialize is {type(materialize).__name__}: pass a function of a path and a module, "
            "such as lambda path, module: load(path, module.to_empty(device='cuda'))"
        )
    _check_model(model, is_materialized=materialize is not None)
    tp = plan.parallelism.tensor_parallel_degree
    if tp > 1 and not tp_plan:
        raise PlanError(
            f"the plan is for {tp} tensor parallel ranks, and no tp_plan says which layers they "
            "share: pass tp_plan, such as {'layers.*.up': ColwiseParallel(), ...}"
        )
    _check_schedule(plan, schedule)


def schedule_name(plan: ClusterFile, schedule: str) -> str:
    """The schedule that is run: what is asked for, or the plan's."""
    return schedule or plan.parallelism.pipeline_parallel_schedule


def plan_digest(plan: ClusterFile, schedule: str) -> str:
    """The same on ranks that apply the same plan."""
    return hashlib.sha256(plan.to_json() + schedule.encode()).hexdigest()


def _check_mesh(plan: ClusterFile, mesh: DeviceMesh) -> None:
    require_world(plan, mesh.size())
    wanted = degrees_of(plan)
    names = mesh.mesh_dim_names or ()
    found = {name: mesh.size(i) for i, name in enumerate(names)}
    if tuple(names) != DIMENSIONS or found != wanted:
        raise PlanError(
            f"the mesh is {found}, and the plan's {wanted}: make it by remat.cluster_mesh(plan)"
        )


def _check_model(model: nn.Module, *, is_materialized: bool) -> None:
    if any(isinstance(module, SharedState) for module in model.modules()):
        raise PlanError(
            "a part of this model follows a plan already: parallelize the original model"
        )
    if not has_storage(model) and not is_materialized:
        raise PlanError(
            f"this {type(model).__name__} is on the meta device and cannot train: pass "
            "materialize=, a function that gives a module of it storage and values, or build it "
            "with storage on each rank, with the same seed"
        )


def _check_schedule(plan: ClusterFile, schedule: str) -> None:
    pp = plan.parallelism.pipeline_parallel_degree
    if pp == 1:
        return
    if plan.microbatches < pp:
        raise PlanError(
            f"{plan.microbatches} microbatches are fewer than {pp} stages, which then wait for "
            f"each other: plan again with a larger --batch, or --pp {plan.microbatches}"
        )
    name = schedule_name(plan, schedule)
    if (name in ONE_STAGE) != (plan.chunks == 1):
        raise PlanError(
            f"schedule {name} is not for {plan.chunks} stages on each rank, as the plan has: "
            f"choose {', '.join(ONE_STAGE)} for one, and plan others with --chunks 2 or more"
        )
    try:
        torch_order(name, pp, plan.microbatches, plan.chunks)
    except ScheduleError as error:
        raise PlanError(str(error)) from error
