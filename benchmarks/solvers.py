"""Every solver on every graph: `python -m benchmarks.solvers --out RESULTS.json`.

Budgets are w + f · (p - w) for f = 0.7, 0.5, 0.3, 0.15. Here w is what the largest op needs,
resident bytes included, and p is the peak of the unmodified step. One more budget is the least
that `auto` knows to be feasible (`least`). `--fractions 80%` asks for so much of p. Each solve has
a process of its own, whose memory is measured, and which is killed if it runs far past its
limit. Each cell is kept as soon as it is done. Cells that the file has already are skipped, so a
run that was stopped goes on where it was; `--again` solves them anew.

A solver may carry options: `--solvers cut auto:order=free,seed=1`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cells.cell import in_own_process
from benchmarks.graphs import grid, names
from remat.solver import TABLE
from remat.solver.table import NEEDS_LINKS

FRACTIONS = ("0.7", "0.5", "0.3", "0.15", "least")
FAST_GRAPHS = ("gpt12", "resnet18", "unet", "chain64", "layered250")
FAST_FRACTIONS = ("0.5", "0.3")
ROOT = Path(__file__).parents[1]
DEFAULT_SOLVERS = [name for name in TABLE if name not in NEEDS_LINKS]
"""No graph here has links; `benchmarks.offload` has some."""
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "solvers.json"


class Results:
    """The results file: facts of each graph, and one cell for each graph, fraction and solver."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.graphs: dict[str, dict[str, Any]] = {}
        self.cells: dict[str, dict[str, Any]] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            self.graphs, self.cells = kept["graphs"], kept["cells"]

    def save(self) -> None:
        """Write the file anew, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".part")
        fresh.write_text(json.dumps({"graphs": self.graphs, "cells": self.cells}, indent=1) + "\n")
        fresh.replace(self.path)


def budget_bytes(facts: dict[str, Any], fraction: str) -> int:
    """The budget of a graph at a fraction, or its least one; 0 if that is unknown."""
    if fraction == "least":
        return int(facts["least_bytes"])
    if fraction.endswith("%"):
        return int(float(fraction[:-1]) * facts["peak_bytes"] / 100)
    low, high = facts["working_set_bytes"], facts["peak_bytes"]
    return int(low + float(fraction) * (high - low))


def facts_of(results: Results, graph: str, limit_s: float) -> dict[str, Any]:
    """Sizes of a graph, from the file or found now."""
    if graph not in results.graphs:
        found = in_own_process({"graph": graph, "time_limit_s": limit_s}, limit_s)
        if "error" in found:
            raise SystemExit(f"{graph}: {found['error']}")
        results.graphs[graph] = found
        results.save()
    return results.graphs[graph]


def line(graph: str, fraction: str, cell: dict[str, Any]) -> str:
    """One line of what is shown while it runs."""
    start = f"{graph:22}{fraction:>6} {cell['solver']:24}{cell['status']:12}"
    if cell.get("overhead") is None:
        return f"{start}{'':24}{cell['seconds']:8.1f} s"
    figures = f"{100 * cell['overhead']:9.2f} %{100 * cell['gap']:9.2f} %"
    memory = cell["solver_memory_bytes"] >> 20
    return f"{start}{figures}{cell['seconds']:9.1f} s{memory:7} MiB"


def run(
    results: Results,
    graphs: list[str],
    fractions: list[str],
    solvers: list[str],
    *,
    limit_s: float,
    again: bool = False,
) -> None:
    """Solve all cells that `results` lacks, keeping each as it is done."""
    for graph, fraction in itertools.product(graphs, fractions):
        budget = budget_bytes(facts_of(results, graph, limit_s), fraction)
        for solver in solvers:
            key = f"{graph}|{fraction}|{solver}"
            if not budget or (key in results.cells and not again):
                continue
            asked = {"graph": graph, "solver": solver, "budget_bytes": budget}
            found = in_own_process({**asked, "time_limit_s": limit_s}, limit_s)
            found.setdefault("date", time.strftime("%Y-%m-%d"))
            if "error" in found:
                found.update(status="error", overhead=None)
            results.cells[key] = {"f": fraction, **asked, "time_limit_s": limit_s, **found}
            results.save()
            print(line(graph, fraction, results.cells[key]), flush=True)


def _fraction(text: str) -> str:
    """One of `FRACTIONS`, or a percentage of the peak."""
    number = text.removesuffix("%")
    is_percentage = number != text and number.isdecimal() and int(number) > 0
    if text not in FRACTIONS and not is_percentage:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(FRACTIONS)} or, say, 80%")
    return text


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.solvers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = names()
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--graphs", nargs="+", help=f"of {', '.join(known)}")
    parser.add_argument(
        "--solvers", nargs="+", default=DEFAULT_SOLVERS, help=f"of {', '.join(TABLE)}"
    )
    parser.add_argument("--fractions", nargs="+", type=_fraction, metavar="F")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a cell")
    parser.add_argument("--fast", action="store_true", help=f"{', '.join(FAST_GRAPHS)} only")
    parser.add_argument("--again", action="store_true", help="solve what the file has, too")
    asked = parser.parse_args()
    asked.graphs = asked.graphs or list(FAST_GRAPHS if asked.fast else grid())
    asked.fractions = asked.fractions or list(FAST_FRACTIONS if asked.fast else FRACTIONS)
    for graph in asked.graphs:
        if graph not in known:
            parser.error(f"no graph is called {graph!r}: there are {', '.join(known)}")
    for solver in asked.solvers:
        if solver.partition(":")[0] not in TABLE:
            parser.error(f"no solver is called {solver!r}: there are {', '.join(TABLE)}")
    if asked.time_limit <= 0:
        parser.error("--time-limit must be positive")
    return asked


def main() -> int:
    """Run what was asked for."""
    asked = _asked()
    run(
        Results(asked.out), asked.graphs, asked.fractions, asked.solvers,
        limit_s=asked.time_limit, again=asked.again,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
