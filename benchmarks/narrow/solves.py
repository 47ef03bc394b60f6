"""What `auto` makes of narrow graphs, by seconds of the CPU: `python -m benchmarks.narrow.solves`.

Each graph is solved at 80 % of its peak, until so many seconds of the CPU are spent, those of the
processes of HiGHS included: on a machine that is shared, seconds of the clock say little. What was
known after each second goes into `results/narrow.json`, under `--label`.
`python -m benchmarks.layered --narrow --table` prints that file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.cell import commit_here, versions
from benchmarks.narrow.drawn import narrow_graph
from benchmarks.narrow.table import RESULTS, kept, lines
from remat.solver import Progress, make_solver
from remat.solver.problem import Problem
from remat.solver.state import store_all_state

PART = 0.8
"""The budget, of the peak of the unmodified step."""
LONGEST_S = 1e6


def cpu_s() -> float:
    """CPU seconds of this process, of its children that ended, and of those that run (Linux)."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        for child in _read(task / "children").split():
            stat = _read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()
            ticks += int(stat[11]) + int(stat[12]) if stat else 0
    own_s = sum(one.ru_utime + one.ru_stime for one in spent)
    return own_s + ticks / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    """What a file of a thread or process says; nothing if that has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def measured(nodes: int, seed: int, limit_s: float) -> dict[str, Any]:
    """`auto` on one graph until `limit_s` of the CPU are spent."""
    graph = narrow_graph(nodes, seed)
    plain = store_all_state(Problem.of(graph))
    course: list[tuple[float, float | None, float]] = []
    began_s = cpu_s()

    def listen(told: Progress) -> None:
        at_s = cpu_s() - began_s
        if not course or course[-1][1:] != (told.best_overhead, told.bound_overhead):
            course.append((round(at_s, 1), told.best_overhead, told.bound_overhead))
        if at_s > limit_s:
            # A search takes it as Ctrl-C and ends with what it has.
            raise KeyboardInterrupt

    solver = make_solver("auto", gap=GAP_OF_FIGURES, time_limit_s=LONGEST_S, progress=listen)
    found = solver.solve(graph, int(PART * int(plain.peak_bytes.max())))
    bound = found.lower_bound_us / graph.time_us - 1
    return {
        "ops": nodes, "seed": seed, "cpu_s": round(cpu_s() - began_s, 1), "course": course,
        "overhead": found.overhead if found.schedule else None, "bound": bound,
        "gap": found.gap if found.schedule else None, "date": time.strftime("%Y-%m-%d"),
        "versions": versions(), "commit": commit_here(),
    }  # fmt: skip


def main() -> int:
    """Solve what was asked for, and keep each cell as it is done."""
    parser = argparse.ArgumentParser(prog="benchmarks.narrow.solves", description=__doc__)
    parser.add_argument("--nodes", nargs="+", type=int, default=[250, 500, 1000])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--cpu-s", type=float, default=60.0)
    parser.add_argument("--label", default="now")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    for nodes in asked.nodes:
        for seed in asked.seeds:
            cells = kept(asked.out)
            cells[f"{nodes}|{seed}|{asked.label}"] = measured(nodes, seed, asked.cpu_s)
            asked.out.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    sys.stdout.write("\n".join(lines(kept(asked.out))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
