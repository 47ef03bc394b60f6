"""Published cluster jobs beside what the planner says of them, and beside what it chooses freely.

`python -m benchmarks.cluster [--free] [--keep] [NAME ...]`; `--page` only writes the table of the
docs from the kept results. All of our times are modelled. Published figures are those of the papers
named with each job; those marked * were not read again for this table. Jobs without a published
step are printed and not kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.cells.cell import commit_here, versions
from benchmarks.cluster.facts import found_facts, seconds
from benchmarks.cluster.jobs import ALL_AGAIN, HALF_AGAIN, JOBS, UNPUBLISHED, PublishedJob
from benchmarks.cluster.rule import step_with_all_again_us, step_with_half_again_us
from benchmarks.cluster.said import free_lines, published_lines
from benchmarks.cluster.table import write_page
from remat.cluster.mesh import MeshSpec
from remat.cluster.planning import plan_cluster

RESULTS = Path(__file__).parents[1] / "results" / "cluster.json"
RUNNERS_UP = 8
RULES = {HALF_AGAIN: step_with_half_again_us, ALL_AGAIN: step_with_all_again_us}


def published_facts(job: PublishedJob) -> dict[str, Any]:
    """The job, with the planner on its published mesh."""
    began = time.process_time()
    found = plan_cluster(job.factory, job.request(job.mesh), 0)
    facts: dict[str, Any] = {
        "gpus": job.gpus, "device": job.device, "batch": job.batch, "seq": job.seq,
        "source": job.source, "published_s": job.step_s, "published_mfu": job.mfu,
        "on_its_mesh": found_facts(found),
    }  # fmt: skip
    if job.again:
        facts |= {"by_its_rule_s": seconds(RULES[job.again](found)), "its_rule": job.again}
    return facts | _made(began)


def free_facts(job: PublishedJob) -> dict[str, Any]:
    """What is chosen if nothing is fixed."""
    began = time.process_time()
    found = plan_cluster(job.factory, job.request(MeshSpec()), RUNNERS_UP)
    return {"free": found_facts(found), "free_made": _made(began)}


def _made(began_s: float) -> dict[str, Any]:
    return {
        "cpu_s": round(time.process_time() - began_s, 1), "date": time.strftime("%Y-%m-%d"),
        "versions": versions(), "commit": commit_here(),
    }  # fmt: skip


def _keep(name: str, facts: dict[str, Any]) -> None:
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[name] = kept.get(name, {}) | facts
    ordered = {job.name: kept[job.name] for job in JOBS if job.name in kept}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def main() -> None:
    """Print each job, and keep what was asked to be kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="jobs; all if none is named")
    parser.add_argument("--free", action="store_true", help="also what is chosen freely, and why")
    parser.add_argument("--keep", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--page", action="store_true", help="write the table of the docs alone")
    asked = parser.parse_args()
    for job in () if asked.page else (*JOBS, *UNPUBLISHED):
        if not asked.names or job.name in asked.names:
            _run(job, is_free=asked.free, is_kept=asked.keep and job in JOBS)
    if asked.page or asked.keep:
        write_page(json.loads(RESULTS.read_text()))


def _run(job: PublishedJob, *, is_free: bool, is_kept: bool) -> None:
    facts = published_facts(job)
    print(*published_lines(job.name, facts), sep="\n", flush=True)
    if is_free:
        facts |= free_facts(job)
        print(*free_lines(facts), sep="\n", flush=True)
    if is_kept:
        _keep(job.name, facts)


if __name__ == "__main__":
    main()
