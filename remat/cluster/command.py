"""The verb `plan-cluster`: one plan for all GPUs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat.cli import options
from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import verb
from remat.cluster.cluster_screen import cluster_json, nothing_fits, show_cluster
from remat.cluster.request import ClusterRequest
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.files.contents import read_contents
from remat.job.kept_plans import PLAN_FILES
from remat.schedules.pipeline.cluster_plan import ClusterFile, read_cluster_plan, require_world
from remat.solver.cluster.mesh import SCHEDULES, Asked

CLUSTER_PANEL, FIX_PANEL = "Cluster and step", "Fix a choice"
WITH_A_MODEL = "(required with a model)"


def _given(flag: str, text: str, panel: str) -> typer.models.OptionInfo:
    return typer.Option(flag, help=text, rich_help_panel=panel)


ModelOrClusterPlan = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PLAN",
        help="path/to/file.py:function that takes batch and seq, or a kept plan to check and show",
        show_default=False,
    ),
]
# No option of click's is required for a model and left out for a plan: the help says so itself.
Gpus = Annotated[
    int | None, _given("--gpus", f"of the whole cluster {WITH_A_MODEL}", CLUSTER_PANEL)
]
Batch = Annotated[
    int | None,
    _given("--batch", f"sequences of a step, over all GPUs {WITH_A_MODEL}", CLUSTER_PANEL),
]
Seq = Annotated[int | None, _given("--seq", f"tokens of a sequence {WITH_A_MODEL}", CLUSTER_PANEL)]
OnDevice = Annotated[str, _given("--device", "a GPU of the table, such as h100", CLUSTER_PANEL)]
NodeSize = Annotated[int, _given("--node-size", "GPUs of a node", CLUSTER_PANEL)]
GpuBudget = Annotated[
    str, _given("--budget", "bytes of one GPU, such as 72GiB; auto leaves a tenth", CLUSTER_PANEL)
]
LinksFile = Annotated[
    Path | None,
    _given("--links", "a profile with links between GPUs, or JSON", CLUSTER_PANEL),
]
Blocks = Annotated[
    str, _given("--blocks", "glob over the paths of blocks, such as 'layers.*'", CLUSTER_PANEL)
]
Ring = Annotated[
    bool,
    _given(
        "--receive-ring",
        "count receive buffers for microbatches in flight alone; torch has one for each",
        CLUSTER_PANEL,
    ),
]
Tp = Annotated[int | None, _given("--tp", "tensor parallel ranks", FIX_PANEL)]
Cp = Annotated[int | None, _given("--cp", "context parallel ranks", FIX_PANEL)]
Pp = Annotated[int | None, _given("--pp", "stages of a pipeline", FIX_PANEL)]
Micro = Annotated[int | None, _given("--microbatch", "its sequences", FIX_PANEL)]
Chunks = Annotated[int | None, _given("--chunks", "of the model on each rank", FIX_PANEL)]
ScheduleName = Annotated[
    str | None,
    _given("--schedule", f"of the pipeline: {', '.join(SCHEDULES)}", FIX_PANEL),
]
Shard = Annotated[int | None, _given("--shard", "ranks that states are split over", FIX_PANEL)]
RunnersUp = Annotated[
    int, typer.Option("--runners-up", min=0, help="how many other meshes within 5 % to show")
]


@verb()
def plan_cluster_verb(
    session: Session,
    model: ModelOrClusterPlan,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    device: OnDevice = "h100",
    node_size: NodeSize = 8,
    budget: GpuBudget = "auto",
    links: LinksFile = None,
    blocks: Blocks = "",
    receive_ring: Ring = False,
    tp: Tp = None,
    cp: Cp = None,
    pp: Pp = None,
    microbatch: Micro = None,
    chunks: Chunks = None,
    shard: Shard = None,
    schedule: ScheduleName = None,
    runners_up: RunnersUp = 5,
    output: options.Output = None,
) -> None:
    """Choose mesh, states, stages and recomputation of a cluster; all times are modelled."""
    if model.endswith(PLAN_FILES):
        plan = read_cluster_plan(read_contents(model), model)
        if gpus:
            require_world(plan, gpus, model)
        _show(session, plan, "")
        return
    if not gpus or not batch or not seq:
        required = {"--gpus": gpus, "--batch": batch, "--seq": seq}
        missing = " and ".join(flag for flag, number in required.items() if not number)
        raise DeviceError(f"a cluster is planned for a number of GPUs and a batch: give {missing}")
    asked = Asked(tp, cp, pp, microbatch, chunks, shard, schedule)
    request = ClusterRequest(
        gpus, batch, seq, device, node_size, budget, links, asked, blocks, receive_ring
    )
    # It imports torch, which a kept plan does not need.
    from remat.cluster.planning import plan_cluster

    found = plan_cluster(model, request, runners_up, session.stopwatch)
    if found.file is None:
        session.conclude(INFEASIBLE, [nothing_fits(gpus, found.cluster.budget_bytes)])
        return
    if output is not None:
        session.save(output, found.file.to_json(), "plan")
    _show(
        session, found.file,
        f"{found.evaluated} meshes evaluated, {found.pruned} pruned by a bound; {found.captured} "
        f"parts captured, {found.read} read from disk",
    )  # fmt: skip


def _show(session: Session, plan: ClusterFile, found: str) -> None:
    if session.as_json:
        session.emit(cluster_json(plan))
    else:
        show_cluster(session.out, plan, found)
