"""The verb `cluster`: one plan for all GPUs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import Output, verb
from remat.cluster.mesh import SCHEDULES, ClusterRequest, MeshSpec
from remat.cluster.pictures import cluster_page
from remat.cluster.pipeline_replay import HOLDERS, PipelineReplay, holders_in
from remat.cluster.plan_file import ClusterFile, Parallelism, read_cluster_plan, require_world
from remat.formats import GIB, bytes_text, percent_text, plain_table
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.files import read_contents
from remat.job.plan_source import PLAN_FILES

_MOST_STAGES = 8
"""More are not shown one by one: the first and last ones, and one of the middle."""
_HELD = ("OS", "P", "G", "borders", "saved", "for W", "runs")
"""Columns of bytes, of each of `HOLDERS`."""


def _show_cluster(console: Console, plan: ClusterFile, found: str = "") -> None:
    """`found` : how the plan was found, in words; empty where it was read from a file."""
    size = f"{plan.parameters / 1e9:.1f}B parameters"
    head = (
        f", {size}, {plan.gpus} x {plan.device}, batch {plan.batch} x {plan.seq}, budget "
        f"{bytes_text(plan.budget_bytes)} a GPU\n"
    )
    console.print(Text.assemble((plan.model, "bold"), head))
    console.print(_mesh_rows(plan, found))
    console.print()
    console.print(_stages(plan))
    console.print("bytes in GiB; flight: microbatches in flight; again: time of recomputation")
    if plan.runners_up:
        console.print()
        console.print(_runners_up(plan))
    console.print()
    for note in plan.modelled:
        console.print(f"modelled  {note}", markup=False, soft_wrap=True)


def page_of(plan: ClusterFile, replay: PipelineReplay) -> str:
    mesh = mesh_text(plan.parallelism, plan.virtual_stages)
    return cluster_page(plan, replay, mesh, _states_text(plan))


def _mesh_rows(plan: ClusterFile, found: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    mesh = mesh_text(plan.parallelism, plan.virtual_stages)
    table.add_row("mesh", f"{mesh} (dp: replicate x shard)")
    table.add_row("states", _states_text(plan))
    size = plan.parallelism.pipeline_parallel_microbatch_size
    of_rank = f"{plan.microbatches} microbatches of {size} on each data parallel rank"
    table.add_row("batch", of_rank)
    predicted = plan.predicted
    step = f"{_seconds_text(predicted.step_us)} modelled, MFU {percent_text(predicted.mfu)}"
    if plan.parallelism.pipeline_parallel_schedule:
        step += f", ranks wait {percent_text(predicted.bubble)}, replayed in torch's order"
    table.add_row("step", step)
    table.add_row(
        "overlap", f"without any, {_seconds_text(predicted.without_overlap_us)}: what lies between "
        "is only as good as the model of it",
    )  # fmt: skip
    if found:
        table.add_row("found", found)
    return table


def mesh_text(mesh: Parallelism, virtual_stages: int) -> str:
    """``tp 8  pp 4 ...``, with the pipeline's schedule."""
    pp, replicas, shards, cp, tp = mesh.degrees
    text = f"tp {tp}  cp {cp}  pp {pp}  dp {replicas} x {shards}"
    if mesh.pipeline_parallel_schedule:
        text += f"  {mesh.pipeline_parallel_schedule}"
        text += f", {virtual_stages} virtual stages a rank" if virtual_stages > 1 else ""
    return text


def _states_text(plan: ClusterFile) -> str:
    mesh = plan.parallelism
    ranks = mesh.data_parallel_shard_degree * mesh.context_parallel_degree
    keep = mesh.fsdp_reshard_after_forward
    kept = {"never": "whole", "always": "in shards"}.get(keep, f"over {keep} ranks (hpZ)")
    split = f"OS split over {ranks}" if ranks > 1 else "OS whole on each replica"
    reduced = "after each microbatch" if plan.gradients == "each" else "once, at the end"
    return f"{split}; P between forward and backward {kept}; G reduced {reduced}"


def _stages(plan: ClusterFile) -> Table:
    shown = holders_in(stage.held_bytes for stage in plan.stages)
    titles: dict[str, str] = dict(zip(HOLDERS, _HELD, strict=True))
    columns = ("blocks", "flight", "again", *(titles[name] for name in shown), "peak")
    table = plain_table("stage", *columns)
    n = len(plan.stages)
    for number in range(n) if n <= _MOST_STAGES else (0, 1, 2, n // 2, n - 2, n - 1):
        stage = plan.stages[number]
        held = [f"{stage.held_bytes.get(name, 0) / GIB:.1f}" for name in shown]
        again = f"+{percent_text(stage.overhead)}" if stage.overhead > 0 else "none"
        table.add_row(
            str(number), str(len(stage.blocks)), f"{stage.microbatches_in_flight:.3g}",
            again, *held, f"{stage.peak_bytes / GIB:.1f}",
        )  # fmt: skip
    return table


def _runners_up(plan: ClusterFile) -> Table:
    table = plain_table("runner-up within 5 %", "P kept", "step", "MFU")
    for one in plan.runners_up:
        mesh = one.parallelism
        table.add_row(
            f"{mesh_text(mesh, one.virtual_stages)}, "
            f"microbatch {mesh.pipeline_parallel_microbatch_size}",
            mesh.fsdp_reshard_after_forward, _seconds_text(one.step_us), percent_text(one.mfu),
        )  # fmt: skip
    return table


def _seconds_text(time_us: float) -> str:
    return f"{time_us / 1e6:.2f} s"


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
    schedule: _ScheduleName = None, runners_up: _RunnersUp = 5, output: Output = None,
) -> None:  # fmt: skip
    """Plan training on a cluster: mesh, sharding, stages, recomputation. All times are modelled."""
    if model.endswith(PLAN_FILES):
        plan = read_cluster_plan(read_contents(model), model)
        if gpus:
            require_world(plan, gpus, model)
        _show(session, plan, "")
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
    _show(
        session, found.file,
        f"{found.evaluated} meshes evaluated, {found.pruned} pruned by a bound; {found.captured} "
        f"parts captured, {found.read} read from disk",
    )  # fmt: skip


def _show(session: Session, plan: ClusterFile, found: str) -> None:
    if not session.as_json:
        _show_cluster(session.out, plan, found)
        return
    # For programs, without graphs and schedules, which the file has.
    said: dict[str, Any] = msgspec.to_builtins(plan)
    del said["graphs"], said["schedules"]
    hashes = [graph.hash for graph in plan.graphs]
    layers = list(plan.layers_per_stage)
    session.emit(said | {"layers_per_stage": layers, "graph_hashes": hashes})
