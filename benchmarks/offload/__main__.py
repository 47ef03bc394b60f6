"""What copies are worth: `python -m benchmarks.offload [--graphs NAME ...] [--out FILE]`.

Four questions, for steps of `benchmarks/offload/steps.py` on modelled GPUs and links:

- `table`: which overhead has each planner at the budgets floor + f · (peak - floor), what is the
  bound on any plan with copies, and how many bytes go to the host?
- `first`: after how many seconds has `joint` a first plan of 500, 2,000 and 5,000 ops?
- `sweep`: which overhead do links of other rates give, at one budget?
- `slower`: what does a plan cost on links slower than planned? What if it is made for less?

`--graphs` takes names, or graphs in files MODEL-DEVICE.json. Planners are `recompute`, which is
`auto` without links, the published policies, and `joint`. Every overhead is `simulate`'s. Each cell
is kept as soon as it is done, and cells that `--out` has are not made again. Seconds are those of
this machine, however busy it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cells.cell import commit_here, cpu_name, versions
from benchmarks.offload.cells import (
    CAUTION,
    JOINT,
    PLANNERS,
    RATES_GB_S,
    budget_of,
    is_here,
    plan_cell,
    size_facts,
    slower_cell,
    sweep_cell,
)
from benchmarks.offload.steps import DEEP_NAMES, FILE, NAMES, links_of, step
from benchmarks.offload.tables import first_lines, plan_lines, slower_lines, sweep_lines
from benchmarks.solvers import Results
from remat.graph_capture.errors import DeviceError, RematError
from remat.graph_capture.graph import TrainingGraph

OUT = Path(__file__).parents[1] / "results" / "offload.json"
FRACTIONS = (0.5, 0.3, 0.15)
MIDDLE = 0.3
"""The fraction of sweeps, and of links slower than planned."""
BEST = (JOINT, "delta")
"""Which planner sweeps: the first of these that is asked for, else the last that is."""
FIRST = "first"
PARTS = ("table", FIRST, "sweep", "slower")


def run(results: Results, asked: argparse.Namespace) -> None:
    """Make all cells that `results` lacks."""
    given = asked.graphs if set(asked.parts) != {FIRST} else []
    for one in (*given, *(DEEP_NAMES if FIRST in asked.parts else ())):
        try:
            graph = step(one)
        except RematError as error:
            raise SystemExit(f"{one}: {error}") from error
        name = graph.name
        if results.graphs.get(name, {}).get("hash") != graph.hash:
            results.graphs[name] = {**size_facts(graph), "device": graph.device}
        for key, make in cells_of(graph, results.graphs[name], asked):
            if key in results.cells:
                continue
            results.cells[key] = {"graph": name, **make(), **_made()}
            results.save()
            print(f"{key:44}{_said(results.cells[key])}", flush=True)


def cells_of(
    graph: TrainingGraph, facts: dict[str, Any], asked: argparse.Namespace
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """The cells of a step, by name, and how each is made."""
    limit_s, middle = asked.time_limit, budget_of(facts, MIDDLE)
    if graph.name in DEEP_NAMES:
        make = partial(plan_cell, graph, middle, JOINT, limit_s)
        return [(f"{FIRST}|{graph.name}|{MIDDLE:g}|{JOINT}", make)]
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    if "table" in asked.parts:
        for f in asked.fractions:
            for one in asked.planners:
                key = f"plan|{graph.name}|{f:g}|{one}"
                found.append((key, partial(plan_cell, graph, budget_of(facts, f), one, limit_s)))
    best = next((one for one in BEST if one in asked.planners), asked.planners[-1])
    if "sweep" in asked.parts:
        for gb_s in asked.rates:
            key = f"sweep|{graph.name}|{gb_s:g}|{best}"
            found.append((key, partial(sweep_cell, graph, middle, best, gb_s, limit_s)))
    if "slower" in asked.parts:
        for share in CAUTION:
            key = f"slower|{graph.name}|{share:g}|{best}"
            found.append((key, partial(slower_cell, graph, middle, best, share, limit_s)))
    return found


def _made() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "commit": commit_here(),
    }


def _said(cell: dict[str, Any]) -> str:
    if "judged" in cell:
        overheads = (100 * one["overhead"] for one in cell["judged"].values())
        return " / ".join(f"{overhead:.2f}" for overhead in overheads) + " %"
    figure = "does not fit" if cell["overhead"] is None else f"{100 * cell['overhead']:.2f} %"
    return f"{figure:16}{cell['status']:12}{cell['seconds']:8.1f} s"


def _graph(name: str) -> str:
    """A name, or a file that is there and names a device."""
    if name in NAMES:
        return name
    if not name.endswith(FILE) or not Path(name).is_file():
        known = ", ".join(NAMES)
        raise argparse.ArgumentTypeError(
            f"{name} is none of {known}, and no file MODEL-DEVICE{FILE}"
        )
    try:
        links_of(Path(name).stem)
    except DeviceError as error:
        raise argparse.ArgumentTypeError(f"{name} is no MODEL-DEVICE{FILE}: {error}") from error
    return name


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--graphs", nargs="+", type=_graph, default=list(NAMES), metavar="NAME")
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS),
                        metavar="NAME")  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--fractions", nargs="+", type=float, default=list(FRACTIONS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES_GB_S), help="GB/s")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds a plan")
    asked = parser.parse_args(arguments)
    if asked.time_limit <= 0 or any(rate <= 0 for rate in asked.rates):
        parser.error("--time-limit and --rates must be positive")
    return asked


def main(arguments: list[str] | None = None) -> int:
    """Make what was asked for, and print the tables."""
    asked = _asked(arguments)
    missing = [name for name in asked.planners if not is_here(name)]
    asked.planners = [name for name in PLANNERS if name in asked.planners and name not in missing]
    for name in missing:
        print(f"{name}: this release has no such solver, so its columns are left out")
    if not asked.planners:
        return 1
    results = Results(asked.out)
    run(results, asked)
    titles = {"table": plan_lines, FIRST: first_lines, "sweep": sweep_lines, "slower": slower_lines}
    for part in asked.parts:
        print(f"\n## {part}\n", *titles[part](results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
