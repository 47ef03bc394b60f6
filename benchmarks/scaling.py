"""How the cost of a plan grows with the graph: `python -m benchmarks.scaling --out FILE`.

A GPT of 12 to 200 layers is captured, timed with no cost known before, solved at 50 % of its peak
and rewritten, each size in a process of its own. Printed are the seconds of each part, the peak of
the process's memory, and the exponent of a power law fitted to the sums against the number of
ops. Ends with status 1 if the exponent is above 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.cell import cpu_name
from benchmarks.networks.catalogue import gpt
from remat.graph_capture import measure_costs, trace
from remat.ranks.same_order import agreed_rewrite

ROOT = Path(__file__).parents[1]
LAYERS = (12, 25, 50, 100, 150, 200)
SIZES = {"width": 64, "seq": 128, "batch": 8, "head_width": 32, "vocab": 256}
BUDGET = "50%"
PARTS = ("capture_s", "price_s", "solve_s", "rewrite_s")
MOST_EXPONENT = 1.3
MIB = 2**20


def measured(layers: int) -> dict[str, Any]:
    """Seconds of each part for a GPT of so many layers, in this process."""
    made = gpt(layers, **SIZES)
    marks = [time.perf_counter()]
    traced = trace(made["model"], made["args"])
    marks.append(time.perf_counter())
    graph = measure_costs(traced)
    marks.append(time.perf_counter())
    result = remat.solve(graph, BUDGET, gap=GAP_OF_FIGURES)
    marks.append(time.perf_counter())
    if result.schedule is None:
        raise SystemExit(result.message)
    agreed_rewrite(made["model"], result.schedule)
    marks.append(time.perf_counter())
    seconds = dict(zip(PARTS, np.diff(marks).tolist(), strict=True))
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "layers": layers, "ops": len(graph.ops), **seconds, "gap": result.gap,
        "overhead": result.overhead, "process_peak_bytes": peak_bytes,
    }  # fmt: skip


def in_own_process(layers: int) -> dict[str, Any]:
    """As `measured`; without costs from before."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.scaling", "--one", str(layers)], cwd=ROOT,
            env={**os.environ, "REMAT_CACHE": cache}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{layers} layers: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def exponent(rows: list[dict[str, Any]], part: str | None = None) -> float:
    """Of ``seconds = c · ops^exponent``, by least squares of the logarithms."""
    parts = [part] if part else PARTS
    seconds = [sum(row[name] for name in parts) for row in rows]
    slope, _ = np.polyfit(np.log([row["ops"] for row in rows]), np.log(seconds), 1)
    return float(slope)


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=__doc__)
    parser.add_argument("--layers", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--one", type=int, help="measure one size here and print it as JSON")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.one)))
        return 0
    if len(set(asked.layers)) < 2:
        raise SystemExit("an exponent wants two sizes or more")
    print("layers    ops  capture   costs   solve rewrite  process MiB   gap")
    rows: list[dict[str, Any]] = []
    for layers in asked.layers:
        row = in_own_process(layers)
        rows.append(row)
        print(
            f"{layers:6}{row['ops']:7}" + "".join(f"{row[part]:8.2f}" for part in PARTS)
            + f"{row['process_peak_bytes'] / MIB:12.0f}{100 * row['gap']:8.2f} %", flush=True,
        )  # fmt: skip
    exponents = {part.removesuffix("_s"): exponent(rows, part) for part in PARTS}
    total = exponent(rows)
    print(f"exponent of the sum against ops: {total:.2f}; " + str(exponents))
    if asked.out:
        facts = {
            "device": cpu_name(), "torch": str(torch.__version__),
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        kept = {**facts, "budget": BUDGET, "sizes": SIZES, "rows": rows}
        kept |= {"exponent": total, "exponents": exponents}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    return int(total > MOST_EXPONENT)


if __name__ == "__main__":
    sys.exit(main())
