"""What plans reserve, and what that costs: `python -m benchmarks.reserved [--graphs NAME ...]`.

Two questions, for each step of `benchmarks/reserved/steps.py`:

- How much is reserved beyond what is live, for plans at 100, 50, 35 and 25 % of the captured peak?
- Which overhead has the plan that reserves no more than R, half of that peak? It is the plan of the
  largest of the budgets R, 0.98 R, 0.96 R, ... that reserves no more than R. And which has the one
  that torch's allocator runs on a device of R bytes, giving free segments back to it and asking
  again where it is full?

Each cell is kept as soon as it is done, and cells that `--out` has are not made again. The tables
of docs/reserved.md are written anew in the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.cell import cpu_name, versions
from benchmarks.graphs import peak_bytes
from benchmarks.reserved.allocators import reserved_by, retries_by
from benchmarks.reserved.steps import STEPS, captured
from benchmarks.reserved.table import DOCS, write_tables
from benchmarks.solvers import Results
from remat.graph_capture.graph import TrainingGraph
from remat.plan import Plan
from remat.schedules.outcome import Result

OUT = Path(__file__).parents[1] / "results" / "reserved.json"
PERCENTS = (100, 50, 35, 25)
R_PERCENT = 50
"""R, of the captured peak."""
STEP_PERCENT, LEAST_PERCENT = 2, 50
"""How budgets fall, of R, and where the search for one ends."""


def share_cell(name: str, percent: int, limit_s: float) -> dict[str, Any]:
    """A plan at a percentage of the captured peak, and what it reserves."""
    graph = captured(name)
    return figures(name, _plan_within(graph, peak_bytes(graph) * percent // 100, limit_s))


def _plan_within(graph: TrainingGraph, tensors_bytes: int, limit_s: float) -> Plan:
    budget = f"{tensors_bytes}B allocated"
    return remat.solve(graph, budget, time_limit_s=limit_s, gap=GAP_OF_FIGURES)


def one_budget_cell(name: str, limit_s: float) -> dict[str, Any]:
    """By allocator, the plan of the largest budget that reserves no more than R, or runs in R."""
    graph, fitting = captured(name), dict[str, Any]()
    r_bytes = peak_bytes(graph) * R_PERCENT // 100
    for percent in range(100, LEAST_PERCENT - 1, -STEP_PERCENT):
        found = _plan_within(graph, r_bytes * percent // 100, limit_s)
        if found.schedule is None:
            break
        said = figures(name, found)
        retries = retries_by(graph, found.schedule, r_bytes)
        fits = {a: size_bytes <= r_bytes for a, size_bytes in said["reserved_bytes"].items()}
        fits |= {f"{a}, retrying": n is not None for a, n in retries.items()}
        for allocator in (a for a, is_fitting in fits.items() if is_fitting):
            fitting.setdefault(allocator, {"percent_of_r": percent, "retries": retries, **said})
        if len(fitting) == len(fits):
            break
    return {"r_bytes": r_bytes, "fitting": fitting}


def figures(name: str, found: Result) -> dict[str, Any]:
    """Of a plan, if there is one."""
    said = {"status": found.status, "seconds": round(found.wall_s, 1), "message": found.message}
    if found.schedule is None:
        return said
    return said | {
        "overhead": found.overhead,
        "gap": found.gap,
        "peak_bytes": found.peak_bytes,
        "reserved_bytes": reserved_by(captured(name), found.schedule),
    }


def run(results: Results, names: list[str], limit_s: float) -> None:
    """Make the cells that `results` lacks."""
    for name in names:
        wanted: dict[str, Callable[[], dict[str, Any]]] = {
            f"{percent}%": partial(share_cell, name, percent, limit_s) for percent in PERCENTS
        }
        wanted["one budget"] = partial(one_budget_cell, name, limit_s)
        for question, answer in wanted.items():
            key = f"{name}|{question}"
            if key in results.cells:
                continue
            results.graphs[name] = facts(name)
            made = {"cpu": cpu_name(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
            results.cells[key] = {"time_limit_s": limit_s, **made, **answer()}
            results.save()
            print(f"{key:28}{results.cells[key]}", flush=True)


def facts(name: str) -> dict[str, Any]:
    """Sizes of a step."""
    graph = captured(name)
    return {
        "ops": len(graph.ops),
        "device": graph.device,
        "peak_bytes": peak_bytes(graph),
        "resident_bytes": graph.resident.total_bytes,
    }


def main() -> int:
    """Answer both questions, and write the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.reserved", description=__doc__)
    parser.add_argument("--graphs", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a solve")
    asked = parser.parse_args()
    results = Results(asked.out)
    run(results, asked.graphs, asked.time_limit)
    write_tables(results, asked.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
