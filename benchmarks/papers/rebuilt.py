"""Plans for the shapes of published rows, with a bound and a gap each; `simulate` judges all."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.cell import commit_here
from benchmarks.cells.instance_format import graph_of, read_instance
from benchmarks.instance import closing_gap
from benchmarks.papers.published import Figure, Job
from remat.budgets import unmodified
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.simulate import overhead_of

POLICIES = {"dtr": "dtr", "offload": "swap_all"}
"""The solvers that replay the published rule on the same graph, at the same bytes, by table."""


class Line(msgspec.Struct, frozen=True):
    """One published figure beside a plan for the same shapes.

    Attributes
    ----------
    job, name, by : as in `published`. published : its overhead.
    budget_share : of the unmodified peak of the graph planned for.
    policy_overhead : of the published rule on this graph; None where none is asked or found.
    overhead, bound_overhead, gap : ours; None if nothing fits.
    seconds : of our solve. commit : of the code that makes the line.
    """

    job: str
    name: str
    by: str
    published: float
    ops: int
    budget_bytes: int
    budget_share: float
    policy_overhead: float | None
    overhead: float | None
    bound_overhead: float
    gap: float | None
    status: str
    seconds: float
    date: str
    commit: str
    versions: dict[str, str]


def lines_of(job: Job, references: Path | None, time_limit_s: float) -> Iterator[Line]:
    """The lines of a job; none for a published graph whose folder was not given."""
    if job.make is not None:
        graph = remat.capture(**job.make(), device=job.device, split="none", **job.options)
        gap = None
    elif references is not None:
        instance = read_instance(references / job.file)
        # Their budgets are parts of the peak of values alone.
        instance = msgspec.structs.replace(instance, constant_bytes=0)
        graph, gap = graph_of(instance), closing_gap(instance)
    else:
        return
    whole_bytes = unmodified(graph).peak_bytes
    for figure in job.figures:
        budget = figure.budget_bytes or int(figure.budget_share * whole_bytes)
        yield _line(job, figure, graph, budget, whole_bytes, gap, time_limit_s)


def _line(
    job: Job, figure: Figure, graph: TrainingGraph, budget: int, whole_bytes: int,
    gap: float | None, time_limit_s: float,
) -> Line:  # fmt: skip
    options: dict[str, Any] = {"gap": GAP_OF_FIGURES if gap is None else gap}
    if figure.order != "fixed":
        options["order"] = figure.order
    within = f"{budget}B allocated"
    ours = remat.solve(graph, within, time_limit_s=time_limit_s, **options)
    rule = POLICIES.get(job.table)
    policy = None if rule is None else remat.solve(graph, within, rule)
    return Line(
        job.name, figure.name, figure.by, figure.overhead, len(graph.ops), budget,
        budget / whole_bytes, None if policy is None else _overhead(policy), _overhead(ours),
        overhead_of(ours.lower_bound_us, graph.time_us),
        None if ours.schedule is None else ours.gap, ours.status, round(ours.wall_s, 1),
        time.strftime("%Y-%m-%d"), commit_here(),
        {"torch": str(torch.__version__), "python": platform.python_version()},
    )  # fmt: skip


def _overhead(found: Result) -> float | None:
    return None if found.schedule is None else found.overhead
