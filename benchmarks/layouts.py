"""Arenas of plans, and MiniMalloc's instances: `python -m benchmarks.layouts --out FILE`.

Networks are captured for a modelled H100 and solved by `auto` at falling budgets, the last of which
nothing fits, so that its plan is the least that was found. Each plan's buffers are placed. With
``--minimalloc FOLDER``, the CSV files of that folder are placed within the capacity in their names;
https://github.com/google/minimalloc has A to K under benchmarks/challenging. They take about ten
times as long without Numba, which is used where it is installed; ``--tries`` bounds the work.

Seconds are those of the processor, so that a busy machine changes them little. Ends with status 1
if an arena exceeds the most live bytes by more than .1 %, or 1 % at the least plan, or takes more
than five seconds to find.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.cell import cpu_name
from benchmarks.graphs import NETWORK_NAMES, peak_bytes
from benchmarks.networks.catalogue import NETWORKS
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.layout import Buffers, buffers_of
from remat.solver import solve_within
from remat.solver.layout.boxes import IS_COMPILED, Boxes
from remat.solver.layout.canonical import CanonicalSearch, Preorder
from remat.solver.layout.placing import Fitted, dive, place_buffers

EXAMPLES = ("llama", "unet", "resnet")
"""Of `examples/`, as ``example:NAME``: with other sizes than the networks of the same name."""
PARTS = (1.0, 0.7, 0.5, 0.35, 0.0)
TWO_STEPS = "gpt105"
"""Whose plan at the full peak is placed twice, one step behind the other: more than 12,000."""
MOST_CPU_S = 5.0
MOST_GAP, MOST_GAP_AT_LEAST = 0.001, 0.01
TRIES = 12_000_000
MIB = 2**20


def captured(name: str) -> TrainingGraph:
    """The network, or the example, of that name for an H100."""
    example = name.removeprefix("example:")
    made = (
        NETWORKS[name]()
        if example == name
        else importlib.import_module(f"examples.{example}").factory()
    )
    return remat.capture(device="h100", split="none", **made)


def plans(name: str, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """One row a budget: most live bytes, the arena, its gap, and seconds to place."""
    graph = captured(name)
    for part in PARTS:
        budget_bytes = max(int(part * peak_bytes(graph)), 1)
        result = solve_within(
            graph, budget_bytes, "auto", time_limit_s=time_limit_s, gap=GAP_OF_FIGURES
        )
        schedule = result.schedule or result.least_schedule
        if schedule is None or (part and result.schedule is None):
            continue
        buffers = buffers_of(graph, schedule)
        yield placed(name, part, buffers)
        if name == TWO_STEPS and part == 1.0:
            yield placed(f"two steps of {name}", part, twice(buffers))


def placed(name: str, part: float, buffers: Buffers) -> dict[str, Any]:
    """The row of one plan."""
    began_s = time.process_time()
    layout = place_buffers(buffers)
    return {
        "graph": name, "part": part, "buffers": len(buffers), "load_bytes": layout.load_bytes,
        "arena_bytes": layout.arena_bytes, "gap": layout.gap, "placed_by": layout.placed_by,
        "cpu_s": time.process_time() - began_s,
    }  # fmt: skip


def twice(buffers: Buffers) -> Buffers:
    """The buffers of two steps, the second behind the first, which drops what outlived it."""
    return Buffers.of_arrays(
        np.tile(buffers.size_bytes, 2),
        np.concatenate([buffers.start, buffers.start + buffers.n_times]),
        np.concatenate([buffers.end, buffers.end + buffers.n_times]),
    )


CHIP_PREORDERS = tuple(  # MiniMalloc's, for times that are far apart: widths both ways
    Preorder(keys, widths) for widths in ("ranks", "times") for keys in ("WAT", "TAW", "TWA")
)


def fit_into(boxes: Boxes, capacity: int, tries: int) -> Fitted:
    """Search by MiniMalloc's preorders until one ends, or `tries` are used up in all."""
    search, share, used = CanonicalSearch(boxes), len(boxes), 0
    while True:
        # Which preorder does well differs, and it needs few tries: each gets few, then more.
        share = min(2 * share, tries - used)
        found = dive(search, capacity, share, tries - used, CHIP_PREORDERS)
        used += found.tries
        if found.offsets is not None or found.is_proved or used >= tries:
            return found._replace(tries=used)


def instance(path: Path, tries: int) -> dict[str, Any]:
    """A CSV file of id, lower, upper and size, within the capacity in its name."""
    capacity_bytes = int(path.name.split(".")[1])
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64)
    begin = table[:, 1].min()
    buffers = Buffers.of_arrays(table[:, 3], table[:, 1] - begin, table[:, 2] - begin)
    began_s = time.process_time()
    boxes = Boxes.of(buffers, 1)
    found = fit_into(boxes, capacity_bytes, tries)
    seconds = time.process_time() - began_s
    return {
        "instance": path.name, "buffers": len(buffers), "load_bytes": buffers.load_bytes,
        "capacity_bytes": capacity_bytes, "is_solved": found.offsets is not None,
        "tries": found.tries, "preorder": "-".join(found.preorder), "cpu_s": seconds,
    }  # fmt: skip


def is_close(row: dict[str, Any]) -> bool:
    """Whether the arena of a plan is near enough to the most live bytes, and found soon."""
    is_near = row["gap"] <= (MOST_GAP if row["part"] else MOST_GAP_AT_LEAST)
    return is_near and row["cpu_s"] <= MOST_CPU_S


def _plans_table(names: list[str], time_limit_s: float) -> list[dict[str, Any]]:
    if names:
        print(f"{'plan':30}{'buffers':>8}{'load MiB':>10}{'arena MiB':>11}{'gap %':>8}{'CPU s':>7}")
    rows: list[dict[str, Any]] = []
    for name in names:
        for row in plans(name, time_limit_s):
            rows.append(row)
            name_at = f"{row['graph']} at"
            at = f"{name_at} {100 * row['part']:.0f} %" if row["part"] else f"{name_at} the least"
            sizes = f"{row['load_bytes'] / MIB:10.1f}{row['arena_bytes'] / MIB:11.1f}"
            figures = f"{100 * row['gap']:8.3f}{row['cpu_s']:7.2f}  {row['placed_by']}"
            print(f"{at:30}{row['buffers']:8}{sizes}{figures}", flush=True)
    return rows


def _instances_table(folder: Path | None, tries: int) -> list[dict[str, Any]]:
    if folder is None:
        return []
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise SystemExit(f"no CSV file is in {folder}")
    if IS_COMPILED:
        instance(paths[0], 100)  # compiles
    print(f"{'instance':22}{'buffers':>8}{'solved':>8}{'tries':>10}{'CPU s':>7}")
    rows: list[dict[str, Any]] = []
    for path in paths:
        row = instance(path, tries)
        rows.append(row)
        solved = "yes" if row["is_solved"] else "no"
        figures = f"{row['tries']:10}{row['cpu_s']:7.1f}  {row['preorder']}"
        print(f"{path.name:22}{row['buffers']:8}{solved:>8}{figures}", flush=True)
    return rows


def main() -> int:
    """Place, print, keep."""
    parser = argparse.ArgumentParser(prog="benchmarks.layouts", description=__doc__)
    known = (*NETWORK_NAMES, *(f"example:{name}" for name in EXAMPLES))
    parser.add_argument("--graphs", nargs="*", choices=known, default=list(known))
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds to solve each plan")
    parser.add_argument("--minimalloc", type=Path, help="folder of MiniMalloc's CSV files")
    parser.add_argument("--tries", type=int, default=TRIES, help="placements tried an instance")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    asked = parser.parse_args()
    rows = _plans_table(asked.graphs, asked.time_limit)
    instances = _instances_table(asked.minimalloc, asked.tries)
    if asked.out:
        facts = {
            "device": cpu_name(), "torch": str(torch.__version__), "numpy": np.__version__,
            "numba": importlib.metadata.version("numba") if IS_COMPILED else None,
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
            "time_limit_s": asked.time_limit, "tries": asked.tries,
        }  # fmt: skip
        kept = {**facts, "plans": rows, "instances": instances}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    return int(not all(map(is_close, rows)))


if __name__ == "__main__":
    sys.exit(main())
