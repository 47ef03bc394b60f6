"""One page of a plan for a cluster: its mesh, its step, its bytes. It needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from remat.formats import bytes_text, percent_text
from remat.schedules.pipeline.cluster_plan import ClusterFile, StageFacts
from remat.schedules.pipeline.holders import holders_in
from remat.schedules.pipeline.mesh_picture import mesh_picture
from remat.schedules.pipeline.replay import PipelineReplay
from remat.schedules.pipeline.step_pictures import bytes_picture, timeline_picture
from remat.schedules.report.page import Figure
from remat.schedules.report.tables import Table


class Section(NamedTuple):
    """A picture with what it says."""

    name: str
    title: str
    says: str
    picture: str


def cluster_page(plan: ClusterFile, replay: PipelineReplay, mesh: str, states: str) -> str:
    """The page, as HTML.

    Parameters
    ----------
    replay : of the plan's pipeline. mesh, states : what the screen says of them.
    """
    from jinja2 import Environment, StrictUndefined

    text = _text_of("remat.schedules.pipeline", "page.html")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    return template.render(
        plan=plan,
        head=f"{plan.parameters / 1e9:.1f}B parameters; a batch of {plan.batch} x {plan.seq} "
        f"tokens; {mesh}; {states}.",
        figures=_figures(plan),
        sections=_sections(plan, replay),
        tables=[_stages(plan), *([_runners_up(plan)] if plan.runners_up else [])],
        style=_text_of("remat.schedules.report", "page.css"),
    )


def _text_of(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _figures(plan: ClusterFile) -> list[Figure]:
    said = plan.predicted
    peak = max(stage.peak_bytes for stage in plan.stages)
    most = max(stage.overhead for stage in plan.stages)
    without = f"{said.without_overlap_us / 1e6:.2f} s if nothing ran beside a collective"
    return [
        Figure("step, modelled", f"{said.step_us / 1e6:.2f} s", without),
        Figure("model flops used", percent_text(said.mfu), "of the peak of all GPUs"),
        Figure("peak of a GPU", bytes_text(peak), f"of {bytes_text(plan.budget_bytes)}"),
        Figure("recomputation", percent_text(most), "of its stage's work, where it is most"),
        Figure("waits", percent_text(said.bubble), "of the ranks' time in the pipeline"),
    ]


def _sections(plan: ClusterFile, replay: PipelineReplay) -> list[Section]:
    mesh = mesh_picture(plan)
    found = [Section("mesh", "Mesh", f"{mesh.says}.", mesh.inline())]
    for name, title, picture in (
        ("step", "The step of each rank", timeline_picture(plan, replay)),
        ("bytes", "Bytes of a GPU over the step", bytes_picture(plan, replay)),
    ):
        found.append(
            Section(
                name, title, picture.says[:1].upper() + picture.says[1:] + ".", picture.inline()
            )
        )
    return found


def _stages(plan: ClusterFile) -> Table:
    holders = holders_in(stage.held_bytes for stage in plan.stages)
    headers = ("stage", "blocks", "in flight", "recomputed", *holders, "peak")
    rows = tuple(_stage_row(number, stage, holders) for number, stage in enumerate(plan.stages))
    return Table("stages", "Stages, with bytes by holder", headers, rows)


def _stage_row(number: int, stage: StageFacts, holders: Sequence[str]) -> tuple[str, ...]:
    held = [bytes_text(stage.held_bytes.get(name, 0)) for name in holders]
    return (
        str(number), str(len(stage.blocks)), f"{stage.microbatches_in_flight:.3g}",
        percent_text(stage.overhead), *held, bytes_text(stage.peak_bytes),
    )  # fmt: skip


def _runners_up(plan: ClusterFile) -> Table:
    rows: list[tuple[str, ...]] = []
    for one in plan.runners_up:
        p = one.parallelism
        degrees = (
            p.tensor_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_degree,
            p.data_parallel_replicate_degree, p.data_parallel_shard_degree, one.chunks,
            p.pipeline_parallel_microbatch_size,
        )  # fmt: skip
        later = percent_text(one.step_us / plan.predicted.step_us - 1)
        how = p.pipeline_parallel_schedule or "-", p.fsdp_reshard_after_forward
        rows.append((f"+{later}", *map(str, degrees), *how))
    headers = (
        "step", "tp", "cp", "pp", "replicas", "shards", "chunks", "microbatch", "schedule",
        "P kept",
    )  # fmt: skip
    return Table("near", "Meshes within 5 % of the step", headers, tuple(rows))
