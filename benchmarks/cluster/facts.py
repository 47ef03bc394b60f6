"""What was found of a job, as facts to keep: a mesh, where its step goes, who holds its bytes."""

from __future__ import annotations

from typing import Any

from remat.cluster.pictures import mesh_text
from remat.cluster.planning import ClusterOutcome, parallelism_of
from remat.cluster.replayed_plan import ReplayedPlan
from remat.graph_capture.distributed.collectives import is_collective_target
from remat.graph_capture.graph import TrainingGraph

GIB = 1 << 30


def found_facts(found: ClusterOutcome) -> dict[str, Any] | None:
    """Of the best plan, with its runners-up; None if nothing fits."""
    if found.file is None:
        return None
    best, file = found.ranked[0], found.file
    fullest = max(best.stages, key=lambda stage: stage.peak_bytes)
    return {
        **mesh_facts(best),
        "without_overlap_s": seconds(file.predicted.without_overlap_us),
        "takes_s": takes(found),
        "again": [best.stages[0].overhead, best.stages[-1].overhead],
        "layers": list(file.layers_per_stage),
        "fullest_gib": {k: round(v / GIB, 2) for k, v in fullest.held_bytes.items()},
        "peak_gib": round(max(best.peak_bytes) / GIB, 2),
        "budget_gib": found.cluster.budget_bytes / GIB,
        "evaluated": found.evaluated, "pruned": found.pruned,
        "runners_up": [mesh_facts(one) for one in found.ranked[1:]],
    }  # fmt: skip


def mesh_facts(one: ReplayedPlan) -> dict[str, Any]:
    """A mesh, and the time of its step."""
    d, mesh = one.plan.mesh.degrees, parallelism_of(one.plan.mesh, one.schedule)
    return {
        "mesh": f"{mesh_text(mesh, d.virtual_stages)}, microbatch {d.microbatch}",
        "tp": d.tp, "cp": d.cp, "pp": d.pp, "dp": d.dp,
        "parameters_kept": mesh.fsdp_reshard_after_forward,
        "states_over": one.plan.mesh.shard,
        "step_s": seconds(one.time_us), "mfu": one.mfu, "waits": one.bubble,
    }  # fmt: skip


def takes(found: ClusterOutcome) -> dict[str, float]:
    """Where the step of the best plan goes, in seconds of a GPU, on average over stages."""
    best, file = found.ranked[0], found.file
    assert file is not None
    d = best.plan.mesh.degrees
    share = d.microbatches / d.pp
    work_us = share * sum(stage.work_us for stage in best.stages)
    again_us = share * sum(stage.extra_us for stage in best.stages)
    *blocks, last = map(_collectives_us, file.graphs)
    waited_us = share * (sum(blocks[kind] for kind in found.job.kind_of_layer) + last)
    tail_us = best.plan.time_us - best.plan.pipeline_us if d.pp > 1 else None
    if tail_us is None:
        tail_us = best.time_us - work_us - again_us
    return {
        "kernels": seconds(work_us - waited_us),
        "computed again": seconds(again_us),
        "tp and cp collectives": seconds(waited_us),
        "waits for stages": seconds(best.time_us - tail_us - work_us - again_us),
        "states": seconds(tail_us),
    }


def _collectives_us(graph: TrainingGraph) -> float:
    return sum(op.cost_us for op in graph.ops if is_collective_target(op.target))


def seconds(time_us: float) -> float:
    """Rounded, so that the file shows what changed; never -0."""
    return round(time_us / 1e6, 4) + 0.0
