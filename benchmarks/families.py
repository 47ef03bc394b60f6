"""Solvers on families of graphs near the least peak: `python -m benchmarks.families FOLDER`.

FOLDER has graphs as JSON, those of `TrainingGraph` or instances with `outputs`, which are live at
the end, and `generate.py NAME SEED OUT`, which makes more of each family. Budgets are 5 % above the
least peak that `auto` knows (tight), and parts of the peak. Each row has the overhead after 10 and
after 40 s, and the gap to the best bound that any of the solvers has proved by then. The budget
`least` asks for that peak itself: how far it is above its bound, at the first mark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.instance_format import Instance, checked, graph_of, op_name
from remat.graph_capture.graph import TrainingGraph
from remat.solver import Progress, Result, make_solver, option_names
from remat.solver.problem import Problem
from remat.solver.state import store_all_state

FAMILIES = ("sp", "densenet", "unet", "randwire", "heavynet")
SEEDS = 10
SOLVERS = ("auto", "cut", "retention", "rotor", "lower_set", "msps", "dtr")
MARKS_S = (10.0, 40.0)
ABOVE_LEAST = 1.05

Known = tuple[float | None, float]  # overhead of the best schedule, None without one; of the bound


def read_graph(path: Path) -> TrainingGraph:
    """A graph of either form."""
    data = path.read_bytes()
    facts = json.loads(data)
    if "ops" in facts:
        return TrainingGraph.from_json(data)
    instance = checked(msgspec.convert(facts, Instance))
    names = {node.id: op_name(i) for i, node in enumerate(instance.nodes)}
    outputs = tuple(names[node] for node in facts.get("outputs", ()))
    return msgspec.structs.replace(graph_of(instance), outputs=outputs)


def made_graphs(folder: Path, families: list[str], seeds: int) -> Iterator[tuple[str, Path]]:
    """What the folder's generator makes, each in a file that is gone after its turn."""
    for family in families:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as place:
                path = Path(place) / f"{family}.json"
                command = [sys.executable, folder / "generate.py", family, str(seed), path]
                subprocess.run(command, check=True)
                yield f"{family} {seed}", path


def known_at_marks(
    graph: TrainingGraph, budget_bytes: int, solver: str, marks_s: tuple[float, ...]
) -> list[Known]:
    """What a solve knew at each mark."""
    course: list[tuple[float, Known]] = [(0.0, (None, 0.0))]

    def listen(told: Progress) -> None:
        course.append((told.seconds, (told.best_overhead, told.bound_overhead)))

    options = {"gap": GAP_OF_FIGURES} if "gap" in option_names(solver) else {}
    made = make_solver(solver, time_limit_s=marks_s[-1], progress=listen, **options)
    found = made.solve(graph, budget_bytes)
    bound = max(course[-1][1][1], found.lower_bound_us / graph.base_us - 1)
    end = found.overhead if found.schedule else None, bound
    course.append((min(found.wall_s, marks_s[-1]), end))
    return [[known for at_s, known in course if at_s <= mark_s][-1] for mark_s in marks_s]


def rows_of(
    name: str, graph: TrainingGraph, budgets: list[str], solvers: list[str],
    marks_s: tuple[float, ...],
) -> Iterator[str]:  # fmt: skip
    """A line of the table for each budget and solver."""
    peak_bytes = int(store_all_state(Problem.of(graph)).peak_bytes.max())
    for budget in budgets:
        if budget == "least":
            yield _least_row(name, graph, peak_bytes, marks_s[0])
            continue
        budget_bytes = _bytes_of(graph, budget, peak_bytes, marks_s[0])
        found = {one: known_at_marks(graph, budget_bytes, one, marks_s) for one in solvers}
        for solver, known in found.items():
            cells = [
                _cell(overhead, max(other[i][1] for other in found.values()))
                for i, (overhead, _) in enumerate(known)
            ]
            share = f"{100 * budget_bytes / peak_bytes:.1f} %"
            yield f"| {name} | {len(graph.ops)} | {share} | {solver} | {' | '.join(cells)} |"


def _bytes_of(graph: TrainingGraph, budget: str, peak_bytes: int, limit_s: float) -> int:
    if budget != "tight":
        return int(float(budget) * peak_bytes)
    return int(ABOVE_LEAST * _without_room(graph, limit_s).least_feasible_bytes)


def _without_room(graph: TrainingGraph, limit_s: float) -> Result:
    return make_solver("auto", time_limit_s=limit_s).solve(graph, 0)


def _least_row(name: str, graph: TrainingGraph, peak_bytes: int, limit_s: float) -> str:
    lost = _without_room(graph, limit_s)
    share = f"{100 * lost.least_feasible_bytes / peak_bytes:.1f} %"
    above = 100 * (lost.least_feasible_bytes / lost.least_bound_bytes - 1)
    cell = f"{above:.1f} % above the bound, {lost.wall_s:.1f} s"
    return f"| {name} | {len(graph.ops)} | {share} | auto | {cell} |"


def _cell(overhead: float | None, bound: float) -> str:
    if overhead is None:
        return "-"
    return f"{100 * overhead:.2f} %, gap {100 * ((1 + overhead) / (1 + bound) - 1):.2f} %"


def main() -> int:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(prog="benchmarks.families", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=os.environ.get("REMAT_FAMILIES"))
    parser.add_argument("--graphs", nargs="*", help="names of files; default: all")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each family")
    parser.add_argument("--budgets", nargs="+", default=["tight", "0.5"])
    parser.add_argument("--solvers", nargs="+", default=list(SOLVERS))
    parser.add_argument("--marks", nargs="+", type=float, default=list(MARKS_S), help="seconds")
    asked = parser.parse_args()
    if asked.folder is None:
        parser.error("name the folder of graphs, or set REMAT_FAMILIES")
    marks_s = tuple(sorted(asked.marks))
    print("| graph | ops | budget | solver |", " | ".join(f"{mark:g} s" for mark in marks_s), "|")
    print("|---|--:|--:|---|" + "---|" * len(marks_s))
    names = [path.stem for path in sorted(asked.folder.glob("*.json"))]
    wanted = [name for name in names if asked.graphs is None or name in asked.graphs]
    handed = ((name, asked.folder / f"{name}.json") for name in wanted)
    made = made_graphs(asked.folder, asked.families, asked.seeds)
    for name, path in (one for graphs in (handed, made) for one in graphs):
        for row in rows_of(name, read_graph(path), asked.budgets, asked.solvers, marks_s):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
