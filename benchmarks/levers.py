"""What each lever does to the least peak, and to the overhead at equal budgets.

    python -m benchmarks.levers [MODEL ...] [--time-limit S]
    python -m benchmarks.levers --results      # the kept ones, as a table

Each model is captured for an H100, whose ops are modelled, and nothing is run. Per cents of a
budget are of the unmodified peak of the step as captured; overheads are over that step's time.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.networks.catalogue import gpt, moe, resnet
from remat.budgets import unmodified
from remat.formats import bytes_text, percent_text
from remat.graph_capture.capture_api import add_costs
from remat.graph_capture.files import write_contents
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.gradients import GradientRelease
from remat.graph_capture.tracing.recipe import Split
from remat.graph_capture.tracing.trace import trace
from remat.schedules.outcome import Result

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "levers.json"
DEVICE = "h100"
SHARES = (0.50, 0.36, 0.25)
TIME_LIMIT_S = 20.0

MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "language model, vocabulary 32,000": lambda: gpt(2, 64, seq=256, batch=4, vocab=32000),
    "gpt12": lambda: gpt(12, 768),
    "moe": moe,
    "resnet50": lambda: resnet((3, 4, 6, 3), bottleneck=True),
    "llama 3 8B": lambda: runpy.run_path(str(ROOT / "examples" / "llama.py"))["factory"](),
}
LEVERS: dict[str, tuple[Split, bool]] = {
    "as captured": ("none", False),
    "head in pieces, exact": ("exact", False),
    "head in pieces, tolerance": ("tolerance", False),
    "updates at once": ("none", True),
    "updates at once, head in pieces, exact": ("exact", True),
    "updates at once, head in pieces, tolerance": ("tolerance", True),
}
"""How heads may be split, and whether parameters are updated during backward."""


class Cell(msgspec.Struct, frozen=True):
    """One model with one lever.

    Attributes
    ----------
    least_bytes : the least peak found. pieces : of the head at that peak.
    overheads, gaps : at each of `SHARES`; None where nothing fits.
    """

    model: str
    lever: str
    unmodified_bytes: int
    least_bytes: int
    pieces: int
    overheads: tuple[float | None, ...]
    gaps: tuple[float | None, ...]


def cell(model: str, lever: str, time_limit_s: float) -> Cell:
    """Capture and solve, with `time_limit_s` for each of the solves."""
    graph = captured(MODELS[model](), *LEVERS[lever])
    peak_bytes = unmodified(graph).peak_bytes
    least = remat.solve(graph, "min", time_limit_s=time_limit_s, gap=GAP_OF_FIGURES)
    found = [_at(graph, int(share * peak_bytes), time_limit_s) for share in SHARES]
    pieces = least.schedule.chunks if least.schedule else ()
    return Cell(
        model, lever, peak_bytes, least.peak_bytes, pieces[0].chunks if pieces else 1,
        tuple(one.overhead if one.schedule else None for one in found),
        tuple(one.gap if one.schedule else None for one in found),
    )  # fmt: skip


def captured(made: dict[str, Any], split: Split, is_updated: bool) -> TrainingGraph:
    """The graph of a step with a lever, with costs; an update takes no time and no memory."""
    updates = tuple(name for name, _ in made["model"].named_parameters())
    gradient_release = GradientRelease(is_added=False, updates=updates) if is_updated else None
    return add_costs(trace(**made, device=DEVICE, split=split, gradient_release=gradient_release))


def _at(graph: TrainingGraph, budget_bytes: int, time_limit_s: float) -> Result:
    budget = f"{budget_bytes}B allocated"
    return remat.solve(graph, budget, time_limit_s=time_limit_s, gap=GAP_OF_FIGURES)


def table(cells: list[Cell]) -> str:
    """The cells as a table in Markdown."""
    shares = " | ".join(f"{100 * share:.0f} %" for share in SHARES)
    lines = [f"| model | lever | unmodified | least peak | pieces | {shares} |"]
    lines.append("|---" * (5 + len(SHARES)) + "|")
    for one in cells:
        overheads = " | ".join("-" if x is None else percent_text(x) for x in one.overheads)
        sizes = f"{bytes_text(one.unmodified_bytes)} | {bytes_text(one.least_bytes)}"
        lines.append(f"| {one.model} | {one.lever} | {sizes} | {one.pieces} | {overheads} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Solve for the models that are named, keep the cells, and print all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S)
    parser.add_argument("--results", action="store_true", help="print the kept results")
    asked = parser.parse_args(argv)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    cells = msgspec.convert(kept, list[Cell])
    for model in [] if asked.results else asked.models or MODELS:
        for lever in LEVERS:
            found = cell(model, lever, asked.time_limit)
            cells = [one for one in cells if (one.model, one.lever) != (model, lever)] + [found]
            print(table([found]).splitlines()[-1], flush=True)
            write_contents(RESULTS, msgspec.json.format(msgspec.json.encode(cells), indent=1))
    print(table(cells))


if __name__ == "__main__":
    main(sys.argv[1:])
