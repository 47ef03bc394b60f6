"""The table of what `auto` made of narrow graphs, which `layered --narrow --table` prints.

`python -m benchmarks.narrow.solves` makes its cells.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.solver_table import head, percent, row

RESULTS = Path(__file__).parents[1] / "results" / "narrow.json"
TITLES = ("ops", "seed", "version", "CPU s", "first schedule", "overhead", "bound", "gap")


def lines(cells: dict[str, dict[str, Any]]) -> list[str]:
    """One row a cell: CPU seconds, those until the first schedule, overhead, bound and gap."""
    table = head(list(TITLES))
    for key, cell in sorted(cells.items(), key=lambda one: (one[1]["ops"], one[1]["seed"], one[0])):
        first = next((str(at) for at, overhead, _ in cell["course"] if overhead is not None), "-")
        shown = [cell["overhead"], cell["bound"], cell["gap"]]
        table.append(
            row(
                [
                    str(cell["ops"]),
                    str(cell["seed"]),
                    f"{key.rpartition('|')[2]} ({cell['commit']})",
                    str(cell["cpu_s"]),
                    first,
                    *("-" if x is None else percent(x) for x in shown),
                ]
            )
        )
    return table


def kept(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The cells of the file, none if there is none."""
    return json.loads(path.read_text())["cells"] if path.exists() else {}
