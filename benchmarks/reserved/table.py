"""The tables of docs/reserved.md, between `<!-- shares -->` and the like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.solver_table import head, made_on, replaced, row
from benchmarks.solvers import Results

DOCS = Path(__file__).parents[2] / "docs" / "reserved.md"
MIB = 1 << 20
COLUMNS = (
    "arena",
    "stitched",
    "expandable",
    "default",
    "expandable, retrying",
    "default, retrying",
)


def write_tables(results: Results, docs: Path = DOCS) -> None:
    """Both tables, made of the results."""
    text = docs.read_text(encoding="utf-8")
    text = replaced(text, "shares", share_lines(results))
    docs.write_text(replaced(text, "one_budget", one_budget_lines(results)), encoding="utf-8")


def share_lines(results: Results) -> list[str]:
    """One row a step: reserved over live, default and expandable, at each budget."""
    questions = [q for q in _questions(results) if q.endswith("%")]
    lines = [made_on(list(results.cells.values())), ""]
    lines += head(["step", "peak MiB", *(q.replace("%", " %") for q in questions)])
    for name, facts in results.graphs.items():
        cells = (results.cells.get(f"{name}|{question}") for question in questions)
        shown = [_beyond_live(cell, facts["resident_bytes"]) for cell in cells]
        lines.append(row([name, f"{facts['peak_bytes'] / MIB:.0f}", *shown]))
    return lines


def _beyond_live(cell: dict[str, Any] | None, resident_bytes: int) -> str:
    """Of the bytes that are not resident: ``17 / 2 %``."""
    if cell is None or "reserved_bytes" not in cell:
        return "nothing fits"
    live_bytes = cell["peak_bytes"] - resident_bytes
    both = (cell["reserved_bytes"][name] - resident_bytes for name in ("default", "expandable"))
    return " / ".join(f"{100 * (size_bytes / live_bytes - 1):.0f}" for size_bytes in both) + " %"


def one_budget_lines(results: Results) -> list[str]:
    """One row a step: overhead by allocator, and the budget of that plan as a share of R."""
    lines = head(["step", "R MiB", *COLUMNS])
    for name in results.graphs:
        cell = results.cells.get(f"{name}|one budget")
        if cell is not None:
            shown = [_overhead(cell["fitting"].get(allocator)) for allocator in COLUMNS]
            lines.append(row([name, f"{cell['r_bytes'] / MIB:.0f}", *shown]))
    return lines


def _overhead(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return "none found"
    return f"{100 * plan['overhead']:.1f} % ({plan['percent_of_r']} %)"


def write_recorded(rows: list[dict[str, Any]], made: dict[str, Any], docs: Path = DOCS) -> None:
    """The table of predicted and recorded steps."""
    text = docs.read_text(encoding="utf-8")
    docs.write_text(replaced(text, "recorded", recorded_lines(rows, made)), encoding="utf-8")


def recorded_lines(rows: list[dict[str, Any]], made: dict[str, Any]) -> list[str]:
    """One row a step: bytes live at most, and reserved in both settings."""
    columns = ("live", "default", "expandable")
    lines = [f"{made['cpu']}. torch {made['versions']['torch']}. {made['date']}.", ""]
    lines += head(["step", "plan", *columns])
    for said in rows:
        pairs = (f"{_mib(said[c]['predicted'])} | {_mib(said[c]['recorded'])}" for c in columns)
        lines.append(row([said["step"], said["plan"], *(p.replace("|", "\\|") for p in pairs)]))
    return lines


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f}"


def _questions(results: Results) -> list[str]:
    return list(dict.fromkeys(key.partition("|")[2] for key in results.cells))
