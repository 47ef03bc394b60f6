"""Writes docs/solvers.md's tables: `python -m benchmarks.solver_table [RESULTS.json]`.

`<!-- solvers -->` holds a row for each solver, from its header and its results in the file that
`benchmarks.solvers` wrote; `<!-- table -->` a row for each budget. The overhead of each solver on
each graph goes to a file beside the results.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from remat.solver import TABLE, solver_class

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "solvers.md"
RESULTS = ROOT / "benchmarks" / "results" / "solvers.json"
SLACK = 1e-9

Cells = list[dict[str, Any]]


def header_of(name: str) -> str:
    """What a solver is also called, its paper, what it solves, at what cost."""
    made = solver_class(name)
    own = inspect.cleandoc(made.__doc__ or "")
    if "Solves:" not in own:  # solvers that share a file say what they are at their classes
        return inspect.cleandoc(sys.modules[made.__module__].__doc__ or "")
    return re.split(r"\n\nAttributes\n-+\n", own)[0]


def solver_lines(cells: Cells) -> list[str]:
    """One row for each solver: the first paragraph of its header, and its results."""
    summary = _summary(cells)
    lines = head(["solver", "what it does", "found", "proved", "step over the best", "median s"])
    for name in TABLE:
        what = " ".join(header_of(name).partition("\n\n")[0].split()).removesuffix(".")
        found, _, proved, over, seconds, _ = summary.get(name, ["-"] * 6)
        lines.append(row([f"`{name}`", what, found, proved, over, seconds]))
    return lines


def table_lines(cells: Cells) -> list[str]:
    """One row for each budget: on how many graphs there is a plan, and how far from the bound."""
    lines = [made_on(cells), ""]
    lines += head(["budget", "graphs", "a plan found", "proved optimal", "gap, median", "largest"])
    for f in _fractions(cells):
        own = [cell for cell in cells if cell["f"] == f]
        graphs = _distinct(cell["graph"] for cell in own)
        gaps = [_gap([cell for cell in own if cell["graph"] == graph]) for graph in graphs]
        found = [gap for gap in gaps if gap is not None]
        proved = sum(gap <= SLACK for gap in found)
        figures = [len(graphs), len(found), proved]
        ends = [percent(of(found)) if found else "-" for of in (statistics.median, max)]
        lines.append(row([_title(f), *map(str, figures), *ends]))
    return lines


def _gap(cells: Cells) -> float | None:
    """How far the best plan of all solvers is from the best bound; None without a plan."""
    found = [cell["overhead"] for cell in cells if cell["overhead"] is not None]
    if not found:
        return None
    return max(0.0, (1 + min(found)) / (1 + max(map(_bound, cells))) - 1)


def detail_lines(graphs: dict[str, dict[str, Any]], cells: Cells) -> list[str]:
    """The best of each graph, all figures of each solver, and its overhead on each graph.

    They are too long for the document, and go to a file beside the results.
    """
    lines = ["# Overhead by solver and graph", ""]
    lines += [f"Made by `python -m benchmarks.solver_table`. {made_on(cells)}"]
    lines += ["", "## The best known of each graph", "", *_best_table(graphs, cells)]
    lines += ["", "## Each solver over all cells", "", *_summary_table(cells)]
    for graph in graphs:
        rows = _detail_table([cell for cell in cells if cell["graph"] == graph])
        if rows:
            lines += ["", f"## {graph}, {graphs[graph]['ops']} ops", "", *rows]
    return lines


def made_on(cells: Cells) -> str:
    """The processor, versions, dates and limits with which the figures were made."""
    facts = {
        what: _distinct(str(cell[what]) for cell in cells if what in cell)
        for what in ("cpu", "date", "time_limit_s")
    }
    versions = _distinct(
        f"{name} {version}" for cell in cells for name, version in cell.get("versions", {}).items()
    )
    days = sorted(facts["date"])
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    limits = " or ".join(facts["time_limit_s"])
    return f"{'; '.join(facts['cpu'])}. {', '.join(versions)}. {span}. {limits} s a cell."


def _distinct(items: Any) -> list[str]:
    return list(dict.fromkeys(items))


def _fractions(cells: Cells) -> list[str]:
    found = _distinct(cell["f"] for cell in cells)
    return sorted(found, key=lambda f: math.inf if f == "least" else -float(f))


def _best_table(graphs: dict[str, dict[str, Any]], cells: Cells) -> list[str]:
    fractions = _fractions(cells)
    lines = head(["graph", "ops", "peak MiB", *(_title(f) for f in fractions)])
    for graph, facts in graphs.items():
        own = [cell for cell in cells if cell["graph"] == graph]
        if own:
            shown = [_best([cell for cell in own if cell["f"] == f]) for f in fractions]
            peak = f"{facts['peak_bytes'] / 2**20:.2f}"
            lines.append(row([graph, str(facts["ops"]), peak, *shown]))
    return lines


def _title(fraction: str) -> str:
    return "least budget" if fraction == "least" else f"f = {fraction}"


def _best(cells: Cells) -> str:
    """Least overhead, who found it first, and the best bound."""
    found = [cell for cell in cells if cell["overhead"] is not None]
    if not found:
        return "none found" if cells else "-"
    least = min(cell["overhead"] for cell in found)
    fastest = min(
        (cell for cell in found if cell["overhead"] <= least + SLACK),
        key=lambda cell: cell["seconds"],
    )
    bound = max(_bound(cell) for cell in cells)
    end = f"bound {percent(bound)}"
    if abs(least - bound) <= SLACK:
        end = "optimal"
    elif least < bound:
        end = f"in another order; bound of the captured one {percent(bound)}"
    return f"{percent(least)} ({fastest['solver']}, {end})"


def _bound(cell: dict[str, Any]) -> float:
    """The bound that a cell proves for the captured order; 0 if other orders were allowed."""
    has_other_order = "order=free" in cell["solver"]
    return 0.0 if has_other_order else cell.get("bound_overhead") or 0.0


def _summary_table(cells: Cells) -> list[str]:
    titles = ["solver", "found", "best", "proved", "mean step over best", "median s", "max MiB"]
    return [*head(titles), *(row([f"`{name}`", *of]) for name, of in _summary(cells).items())]


def _summary(cells: Cells) -> dict[str, list[str]]:
    """By solver: how often it finds a schedule, how good, how fast, how large."""
    least: dict[tuple[str, str], float] = {}
    for cell in cells:
        if cell["overhead"] is not None:
            key = cell["graph"], cell["f"]
            least[key] = min(cell["overhead"], least.get(key, math.inf))
    found_by: dict[str, list[str]] = {}
    for solver in _distinct(cell["solver"] for cell in cells):
        own = [cell for cell in cells if cell["solver"] == solver]
        possible = [cell for cell in own if (cell["graph"], cell["f"]) in least]
        found = [cell for cell in own if cell["overhead"] is not None]
        over = [
            (1 + cell["overhead"]) / (1 + least[cell["graph"], cell["f"]]) - 1 for cell in found
        ]
        found_by[solver] = [
            f"{len(found)} of {len(possible)}",
            str(sum(extra <= SLACK for extra in over)),
            str(sum(cell["status"] == "optimal" for cell in found)),
            percent(statistics.mean(over)) if over else "-",
            f"{statistics.median(cell['seconds'] for cell in own):.1f}",
            f"{max(cell.get('solver_memory_bytes', 0) for cell in own) / 2**20:.0f}",
        ]
    return found_by


def _detail_table(cells: Cells) -> list[str]:
    """Rows are solvers, columns budgets; entries are overheads, and seconds in brackets."""
    if not cells:
        return []
    fractions = _fractions(cells)
    lines = head(["solver", *(_title(f) for f in fractions)])
    for solver in _distinct(cell["solver"] for cell in cells):
        entry = {cell["f"]: _entry(cell) for cell in cells if cell["solver"] == solver}
        lines.append(row([f"`{solver}`", *(entry.get(f, "-") for f in fractions)]))
    return lines


def _entry(cell: dict[str, Any]) -> str:
    seconds = f"({cell['seconds']:.1f} s)"
    if cell["overhead"] is None:
        return f"{cell['status']} {seconds}"
    mark = " optimal" if cell["status"] == "optimal" else ""
    return f"{percent(cell['overhead'])}{mark} {seconds}"


def percent(fraction: float) -> str:
    """A fraction as a percentage; one below zero comes from rounding, and shows as zero."""
    return f"{100 * max(fraction, 0.0):.2f} %"


def head(titles: list[str]) -> list[str]:
    """The first two lines of a table."""
    return [row(titles), row(["---"] * len(titles))]


def row(entries: list[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(entries)} |"


def replaced(document: str, marker: str, lines: list[str]) -> str:
    """The document with `lines` between the markers of that name.

    Raises
    ------
    ValueError : it has no such markers.
    """
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, found, rest = document.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the document has no {start} followed by {end}")
    body = "".join(f"{line}\n" for line in lines)
    return f"{before}{start}\n{body}{end}{after}"


def written_into(text: str, cells: Cells) -> str:
    """The document with its tables of these results."""
    return replaced(replaced(text, "solvers", solver_lines(cells)), "table", table_lines(cells))


def main() -> int:
    """Write the document anew."""
    parser = argparse.ArgumentParser(prog="benchmarks.solver_table", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    results = json.loads(asked.results.read_text())
    cells = list(results["cells"].values())
    details = detail_lines(results["graphs"], cells)
    asked.results.with_suffix(".md").write_text("\n".join([*details, ""]))
    asked.docs.write_text(written_into(asked.docs.read_text(), cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
