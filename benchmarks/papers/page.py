"""docs/against_papers.md, from the kept lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.papers.published import JOBS, Job
from benchmarks.papers.rebuilt import Line
from benchmarks.solver_table import head, row
from remat.formats import percent_text
from remat.graph_capture.files import write_contents

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "papers.json"
PAGE = ROOT / "docs" / "against_papers.md"
INTRODUCTION = Path(__file__).with_name("introduction.md")
TITLES = {
    "dtr": """## DTR's models

Budgets are the shares of the peak that DTR reached, measured on a Titan V. *Its rule* replays
DTR's policy on our graph.
""",
    "offload": """## DeepCompile's offload

The published figure compares planned offload with offloading everything. Our plan may also
recompute.
""",
    "batch": """## VGG-19 in 16 GB

The batches that each method fits with at most one more forward, which is 33.3 %.
""",
    "instance": """## Published graphs

Costs and bytes are those of the reference files.
""",
}
"""A part for each table of jobs."""
RULES = {"dtr": ("its rule",), "offload": ("all offloaded", "ours against that")}
"""Columns of the replayed rule."""


def kept_lines() -> list[Line]:
    """The lines that were solved."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return msgspec.convert(kept, list[Line])


def write_lines(lines: Sequence[Line]) -> None:
    """Keep them, in the order of the jobs."""
    order = [job.name for job in JOBS]
    found = sorted(lines, key=lambda line: (order.index(line.job), -line.budget_share, line.name))
    write_contents(RESULTS, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def text_of(lines: Sequence[Line]) -> str:
    """The page."""
    parts = [INTRODUCTION.read_text(), _made_of(lines), ""]
    for table, title in TITLES.items():
        jobs = [job for job in JOBS if job.table == table]
        parts += [title, _source(jobs), *_table(table, jobs, lines), ""]
    return "\n".join(parts).rstrip() + "\n"


def _made_of(lines: Sequence[Line]) -> str:
    versions = {f"{name} {what}" for line in lines for name, what in line.versions.items()}
    dates, commits = ({getattr(line, name) for line in lines} for name in ("date", "commit"))
    parts = [versions, dates, {f"commit {commit}" for commit in commits}]
    seconds = [line.seconds for line in lines] or [0.0]
    took = f"Solves took {min(seconds):.1f} to {max(seconds):.0f} s, on a machine under other load."
    return f"Ours: {'; '.join(', '.join(sorted(part)) for part in parts)}. {took}"


def _source(jobs: Sequence[Job]) -> str:
    """Where the published figures are from, and what ours are modelled for."""
    sources, devices = (
        dict.fromkeys(getattr(j, name) for j in jobs) for name in ("source", "device")
    )
    modelled = "".join(f" Ours are modelled for {device}." for device in devices if device)
    return f"Source: {'; '.join(sources)}.{modelled}\n"


def _table(table: str, jobs: Sequence[Job], lines: Sequence[Line]) -> Iterator[str]:
    titles = ["row", "budget", "by", "published", *RULES.get(table, ()), "ours", "bound", "gap"]
    yield from head(titles)
    for job in jobs:
        for line in (one for one in lines if one.job == job.name):
            yield row(_cells(job, line))


def _cells(job: Job, line: Line) -> list[str]:
    rule = [_percent(line.policy_overhead)] if job.table in RULES else []
    if job.table == "offload":
        rule.append(_percent(_against(line.overhead, line.policy_overhead)))
    limit = "≤ " if job.table == "batch" else ""
    return [
        line.name, f"{100 * line.budget_share:.0f} %", line.by.partition(", measured")[0],
        f"{limit}{percent_text(line.published)}", *rule, _percent(line.overhead),
        percent_text(line.bound_overhead), _percent(line.gap),
    ]  # fmt: skip


def _against(ours: float | None, rule: float | None) -> float | None:
    return None if ours is None or rule is None else (1 + ours) / (1 + rule) - 1


def _percent(share: float | None) -> str:
    return "nothing found" if share is None else percent_text(share)
