"""Published cluster jobs beside what the planner says of them, and beside what it chooses freely.

`python -m benchmarks.cluster [--free] [NAME ...]`. All of our times are modelled. Published figures
are those of the papers named with each job; those marked * were not read again for this table.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from remat.cluster.cluster_screen import mesh_text, nothing_fits, seconds_text
from remat.cluster.planning import ClusterOutcome, parallelism_of, plan_cluster
from remat.cluster.request import ClusterRequest
from remat.formats import percent_text
from remat.solver.cluster.mesh import Asked

MODELS = "benchmarks.cluster_models"
H800 = Path(__file__).with_name("cluster_links_h800.json")
KORTHIKANTI = "Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, table 5 *"
TITAN = "torchtitan, 2024-12, benchmarks/llama3_h100_202412_torchtitan.md"
YUAN = "Yuan et al. 2024, the artifact's README *"
LLAMA = "Llama 3, 2024, https://arxiv.org/abs/2407.21783, table 4 *"


@dataclass(frozen=True)
class PublishedJob:
    """A job with its mesh, and what was published of it.

    Attributes
    ----------
    step_s, mfu : as published; None where they were not.
    """

    name: str
    model: str
    gpus: int
    batch: int
    seq: int
    device: str
    mesh: Asked
    source: str
    step_s: float | None = None
    mfu: float | None = None
    links: Path | None = None

    def request(self, asked: Asked) -> ClusterRequest:
        """On GPUs of which 72 GiB are used, as all of these have 80 GB."""
        return ClusterRequest(
            self.gpus, self.batch, self.seq, self.device, 8, "72GiB", self.links, asked,
            receive_ring=self.source is not TITAN,
        )  # fmt: skip


# The paper names three chunks a rank for 175B and 530B, and none for 1T: those are chosen.
JOBS = (
    PublishedJob(
        "gpt-22b", "gpt_22b", 8, 4, 2048, "a100", Asked(8, 1, 1, 4), KORTHIKANTI, 1.10, 0.415
    ),
    PublishedJob(
        "gpt-175b", "gpt_175b", 64, 64, 2048, "a100", Asked(8, 1, 8, 1, 3), KORTHIKANTI, 13.75,
        0.514,
    ),
    PublishedJob(
        "gpt-530b", "gpt_530b", 280, 280, 2048, "a100", Asked(8, 1, 35, 1, 3), KORTHIKANTI, 37.83,
        0.56,
    ),
    PublishedJob(
        "gpt-1t", "gpt_1t", 512, 512, 2048, "a100", Asked(8, 1, 64, 1), KORTHIKANTI, 71.49, 0.563
    ),
    PublishedJob(
        "gpt-530b-2240", "gpt_530b", 2240, 2240, 2048, "a100", Asked(8, 1, 35, 1, 3), KORTHIKANTI,
        None, 0.542,
    ),
    PublishedJob(
        "llama-175b", "llama_175b", 256, 256, 8192, "h100", Asked(2, 2, 16, 1, 1), YUAN, 27.4,
        0.334, H800,
    ),
    PublishedJob(
        "llama3-8b-8", "llama3_8b", 8, 16, 8192, "h100", Asked(1, 1, 1, 2), TITAN, 2.84, 0.33
    ),
    PublishedJob(
        "llama3-8b-128", "llama3_8b", 128, 256, 8192, "h100", Asked(1, 1, 1, 2), TITAN, 2.92, None
    ),
    PublishedJob(
        "llama3-405b", "llama3_405b", 8192, 2048, 8192, "h100", Asked(8, 1, 16, 1), LLAMA, None,
        0.43,
    ),
)  # fmt: skip


def line_of(job: PublishedJob) -> str:
    """The job on its published mesh: ours beside what was published."""
    found = plan_cluster(f"{MODELS}:{job.model}", job.request(job.mesh), 0)
    if not found.ranked:
        return f"{job.name}: {nothing_fits(job.gpus, found.cluster.budget_bytes)}"
    best = found.ranked[0]
    published = [f"MFU {percent_text(job.mfu)}"] if job.mfu else []
    if job.step_s:
        off = best.time_us / 1e6 / job.step_s - 1
        published.append(f"{job.step_s:.2f} s, ours {100 * off:+.1f} %")
    overheads = [stage.overhead for stage in best.stages]
    return (
        f"{job.name} on {job.gpus} x {job.device}: {_mesh(found)}: "
        f"{seconds_text(best.time_us)} modelled, MFU {percent_text(best.mfu)}, recompute "
        f"{percent_text(overheads[0])} first .. {percent_text(overheads[-1])} last; published "
        f"{', '.join(published)} ({job.source})"
    )


def free_line(job: PublishedJob) -> str:
    """What is chosen if nothing is fixed, and why: what it saves beside the published mesh."""
    began = time.process_time()
    found = plan_cluster(f"{MODELS}:{job.model}", job.request(Asked()), 0)
    if not found.ranked:
        return f"    free: {nothing_fits(job.gpus, found.cluster.budget_bytes)}"
    best = found.ranked[0]
    file = found.file
    assert file is not None
    return (
        f"    free: {_mesh(found)}, P kept {file.parallelism.fsdp_reshard_after_forward}: "
        f"{seconds_text(best.time_us)} modelled, MFU {percent_text(best.mfu)}; waits "
        f"{percent_text(best.bubble)}, recompute {percent_text(best.stages[0].overhead)} on the "
        f"first stage; without overlap {seconds_text(file.predicted.without_overlap_us)}; "
        f"{found.evaluated} evaluated, {found.pruned} pruned, {found.captured} captured, "
        f"{time.process_time() - began:.0f} CPU s"
    )


def _mesh(found: ClusterOutcome) -> str:
    best = found.ranked[0]
    mesh = parallelism_of(best.plan.mesh, best.schedule)
    size = best.plan.mesh.degrees.microbatch
    return f"{mesh_text(mesh, best.plan.mesh.degrees.chunks)}, microbatch {size}"


def main() -> None:
    """Print each job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="jobs; all if none is named")
    parser.add_argument("--free", action="store_true", help="also what is chosen freely")
    asked = parser.parse_args()
    for job in JOBS:
        if not asked.names or job.name in asked.names:
            print(line_of(job), flush=True)
            if asked.free:
                print(free_line(job), flush=True)


if __name__ == "__main__":
    main()
