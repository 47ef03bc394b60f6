"""The table of orders of docs/solvers.md: `python -m benchmarks.cells.order_table [RESULTS.json]`.

The file holds `auto` and `auto:order=free` on layered graphs at percentages of the peak, as
`benchmarks.solvers` writes them. A row for each graph is printed; one for each size is written
between `<!-- orders -->` and `<!-- /orders -->`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.solver_table import DOCS, head, made_on, percent, replaced, row

RESULTS = DOCS.parents[1] / "benchmarks" / "results" / "orders.json"
Graphs = dict[str, dict[str, Any]]
Cells = dict[str, dict[str, Any]]
GIVEN, FREE = "auto", "auto:order=free"
TITLES = ("graph", "ops", "given, 90 %", "given, 80 %", "any order, 80 %", "of given")


def size_lines(graphs: Graphs, cells: Cells) -> list[str]:
    """One row for each size: medians over its graphs at 80 % of the peak, and the widest gaps."""
    titles = ("ops", "graphs", "given order", "largest gap", "any order", "largest gap")
    lines = [made_on(list(cells.values())), "", *head(list(titles))]
    for ops in dict.fromkeys(facts["ops"] for facts in graphs.values()):
        names = [name for name, facts in graphs.items() if facts["ops"] == ops]
        shown: list[str] = []
        for solver in (GIVEN, FREE):
            own = [cells[f"{name}|80%|{solver}"] for name in names]
            shown.append(percent(statistics.median(cell["overhead"] for cell in own)))
            shown.append(percent(max(cell["gap"] for cell in own)))
        lines.append(row([str(ops), str(len(names)), *shown]))
    return lines


def order_lines(graphs: Graphs, cells: Cells) -> list[str]:
    """One row a graph: overhead, proved gap and seconds of each order, and their ratio at 80 %."""
    lines = head(list(TITLES))
    for graph, facts in graphs.items():
        at = {
            (f, solver): cells.get(f"{graph}|{f}|{solver}")
            for f in ("90%", "80%")
            for solver in (GIVEN, FREE)
        }
        given, free = at["80%", GIVEN], at["80%", FREE]
        shown = [_entry(at["90%", GIVEN]), _entry(given), _entry(free), _ratio(given, free)]
        lines.append(row([graph, str(facts["ops"]), *shown]))
    return lines


def _entry(cell: dict[str, Any] | None) -> str:
    if cell is None or cell["overhead"] is None:
        return "-" if cell is None else cell["status"]
    gap = f"gap {percent(cell['gap'])}"
    return f"{percent(cell['overhead'])} ({gap}, {cell['seconds']:.0f} s)"


def _ratio(given: dict[str, Any] | None, free: dict[str, Any] | None) -> str:
    if given is None or free is None or not given["overhead"] or free["overhead"] is None:
        return "-"
    return f"{free['overhead'] / given['overhead']:.2f}"


def main() -> int:
    """Write the document anew."""
    parser = argparse.ArgumentParser(prog="benchmarks.cells.order_table", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    found = json.loads(asked.results.read_text())
    print(*order_lines(found["graphs"], found["cells"]), sep="\n")
    lines = size_lines(found["graphs"], found["cells"])
    asked.docs.write_text(replaced(asked.docs.read_text(), "orders", lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
