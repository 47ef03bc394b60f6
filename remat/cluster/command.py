"""The verb `cluster`: one plan for all GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import RenderableType
from rich.text import Text

from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import verb
from remat.cluster.mesh import SCHEDULES, ClusterRequest, MeshSpec
from remat.cluster.pictures import (
    RUNNER_UP_HEADERS,
    mesh_text,
    parameters_text,
    runner_up_rows,
    seconds_text,
    stage_rows,
    states_text,
)
from remat.cluster.pipeline_replay import HOLDERS, holders_in
from remat.cluster.plan_file import ClusterFile, read_cluster_plan, require_world
from remat.formats import GIB, bytes_text, percent_text, plain_table, rows_table
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.files import read_contents
from remat.job.plan_source import PLAN_FILES

_MOST_STAGES = 8  # more are not shown one by one: the first and last ones, and one of the middle
_HELD = ("OS", "P", "G", "borders", "saved", "for W", "runs")
"""Columns of bytes, of each of `HOLDERS`."""


def _cluster_screen(plan: ClusterFile, found: str) -> Iterator[RenderableType]:
    """`found` : how the plan was found, in words; empty where it was read from a file."""
    head = (
        f", {parameters_text(plan)}, {plan.gpus} x {plan.device}, batch {plan.batch} x {plan.seq}, "
        f"budget {bytes_text(plan.budget_bytes)} a GPU\n"
    )
    yield Text.assemble((plan.model, "bold"), head)
    yield rows_table(_mesh_rows(plan, found))
    yield Text()
    titles: dict[str, str] = dict(zip(HOLDERS, _HELD, strict=True))
    shown = [titles[name] for name in holders_in(stage.held_bytes for stage in plan.stages)]
    stages = plain_table("stage", "blocks", "flight", "again", *shown, "peak")
    rows, n = list(stage_rows(plan, lambda size: f"{size / GIB:.1f}")), len(plan.stages)
    for number in range(n) if n <= _MOST_STAGES else (0, 1, 2, n // 2, n - 2, n - 1):
        stages.add_row(*rows[number])
    yield stages
    yield "bytes in GiB; flight: microbatches in flight; again: time of recomputation"
    if plan.runners_up:
        near = plain_table("runner-up within 5 %", *RUNNER_UP_HEADERS)
        for row in runner_up_rows(plan):
            near.add_row(*row)
        yield from (Text(), near)
    yield Text()
    yield from (Text(f"modelled  {note}") for note in plan.modelled)


def _mesh_rows(plan: ClusterFile, found: str) -> Iterator[tuple[str, str]]:
    predicted, size = plan.predicted, plan.parallelism.pipeline_parallel_microbatch_size
    yield "mesh", f"{mesh_text(plan.parallelism, plan.virtual_stages)} (dp: replicate x shard)"
    yield "states", states_text(plan)
    yield "batch", f"{plan.microbatches} microbatches of {size} on each data parallel rank"
    step = f"{seconds_text(predicted.step_us)} modelled, MFU {percent_text(predicted.mfu)}"
    if plan.parallelism.pipeline_parallel_schedule:
        step += f", ranks wait {percent_text(predicted.bubble)}, replayed in torch's order"
    yield "step", step
    without = f"without any, {seconds_text(predicted.without_overlap_us)}"
    yield "overlap", f"{without}: what lies between is only as good as the model of it"
    if plan.unrun:
        yield "to run it", f"not by remat.cluster.parallelize as the model is: {plan.unrun}"
    if found:
        yield "found", found


_FIX = "Fix a choice"
_WITH_A_MODEL = "(required with a model)"


def _given(flag: str, text: str, panel: str = "Cluster and step") -> typer.models.OptionInfo:
    return typer.Option(flag, help=text, rich_help_panel=panel)


_ModelOrClusterPlan = Annotated[str, typer.Argument(
    metavar="MODEL|PLAN",
    help="path/to/file.py:function that takes batch and seq, or a kept plan to check and show",
    show_default=False,
)]  # fmt: skip
# No option of click's is required for a model and left out for a plan: the help says so itself.
_Gpus = Annotated[int | None, _given("--gpus", f"GPUs in the cluster {_WITH_A_MODEL}")]
_Batch = Annotated[
    int | None, _given("--batch", f"sequences per step, over all GPUs {_WITH_A_MODEL}")
]
_Seq = Annotated[int | None, _given("--seq", f"tokens per sequence {_WITH_A_MODEL}")]
_OnDevice = Annotated[str, _given("--device", "a GPU of the table, such as h100")]
_NodeSize = Annotated[int, _given("--node-size", "GPUs per node")]
_OF_BUDGET = "memory per GPU, such as 72GiB; auto leaves a tenth free"
_GpuBudget = Annotated[str, _given("--budget", _OF_BUDGET)]
_LinksFile = Annotated[
    Path | None, _given("--links", "measured links between GPUs: a profile, or JSON")
]
_Blocks = Annotated[str, _given("--blocks", "glob for the paths of blocks, such as 'layers.*'")]
_OF_RING = "count receive buffers only for microbatches in flight; torch has one for each"
_Ring = Annotated[bool, _given("--receive-ring", _OF_RING)]
_Tp = Annotated[int | None, _given("--tp", "tensor parallel ranks", _FIX)]
_Cp = Annotated[int | None, _given("--cp", "context parallel ranks", _FIX)]
_Pp = Annotated[int | None, _given("--pp", "pipeline stages", _FIX)]
_Micro = Annotated[int | None, _given("--microbatch", "sequences per microbatch", _FIX)]
_Virtual = Annotated[int | None, _given("--virtual-stages", "stages per rank", _FIX)]
_OF_SCHEDULE = f"pipeline schedule: {', '.join(SCHEDULES)}"
_ScheduleName = Annotated[str | None, _given("--schedule", _OF_SCHEDULE, _FIX)]
_Shard = Annotated[int | None, _given("--shard", "ranks to shard states over", _FIX)]
_Host = Annotated[str, typer.Option("--host", hidden=True)]
"""Refused, with the command that plans over host memory."""
_RunnersUp = Annotated[
    int, typer.Option("--runners-up", min=0, help="how many other meshes within 5 % to show")
]


@verb()
def cluster_verb(
    session: Session, model: _ModelOrClusterPlan, gpus: _Gpus = None, batch: _Batch = None,
    seq: _Seq = None, device: _OnDevice = "h100", node_size: _NodeSize = 8,
    budget: _GpuBudget = "auto", links: _LinksFile = None, blocks: _Blocks = "",
    receive_ring: _Ring = False, tp: _Tp = None, cp: _Cp = None, pp: _Pp = None,
    microbatch: _Micro = None, virtual_stages: _Virtual = None, shard: _Shard = None,
    schedule: _ScheduleName = None, runners_up: _RunnersUp = 5, output: Path | None = None,
    host: _Host = "",
) -> None:  # fmt: skip
    """Plan training on a cluster: mesh, sharding, stages, recomputation. All times are modelled."""
    if host:
        raise DeviceError(
            f"plan with remat run {model} --device {device} --host {host} --optimizer adamw "
            f"--microbatches 1 --sharding kind=fsdp2,world={gpus or 8}, or leave out --host: "
            "stages of a pipeline stay on their GPUs, and only shards come and go over host memory"
        )
    if model.endswith(PLAN_FILES):
        plan = read_cluster_plan(read_contents(model), model)
        if gpus:
            require_world(plan, gpus, model)
        _answer(session, plan, "")
        return
    if not gpus or not batch or not seq:
        required = {"--gpus": gpus, "--batch": batch, "--seq": seq}
        missing = " and ".join(flag for flag, number in required.items() if not number)
        raise DeviceError(f"give {missing}: a cluster is planned for a number of GPUs and a batch")
    asked = MeshSpec(tp, cp, pp, microbatch, virtual_stages, shard, schedule)
    request = ClusterRequest(
        gpus, batch, seq, device, node_size, budget, links, asked, blocks, receive_ring
    )
    # It imports torch, which a kept plan does not need.
    from remat.cluster.planning import plan_cluster

    found = plan_cluster(model, request, runners_up, session.stopwatch)
    if found.file is None:
        why = (
            f"raise --budget or --gpus, lower --seq, or fix fewer choices: no mesh of {gpus} GPUs "
            f"fits {bytes_text(found.cluster.budget_bytes)} each, even with everything recomputed"
        )
        session.conclude(INFEASIBLE, [why])
        return
    if output is not None:
        session.save(output, found.file.to_json(), "plan")
    _answer(
        session, found.file,
        f"{found.evaluated} meshes evaluated, {found.pruned} pruned by a bound; {found.captured} "
        f"parts captured, {found.read} read from disk",
    )  # fmt: skip


def _answer(session: Session, plan: ClusterFile, found: str) -> None:
    # For programs, without graphs and schedules, which the file has.
    said: dict[str, Any] = msgspec.to_builtins(plan)
    del said["graphs"], said["schedules"]
    hashes = [graph.hash for graph in plan.graphs]
    said |= {"layers_per_stage": list(plan.layers_per_stage), "graph_hashes": hashes}
    session.answer(said, *_cluster_screen(plan, found))
