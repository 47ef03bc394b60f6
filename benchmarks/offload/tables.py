"""The tables of what was found, as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.offload.cells import JOINT, PLANNERS, SLOWER
from benchmarks.solver_table import head, percent, row
from benchmarks.solvers import Results

GIB = 1 << 30


def plan_lines(results: Results) -> list[str]:
    """One row a step and budget: overheads by planner, then bound, gap and bytes of `joint`.

    No other planner proves a bound that allows for copies.
    """
    cells = {key: cell for key, cell in results.cells.items() if key.startswith("plan|")}
    shown = [name for name in PLANNERS if any(cell["solver"] == name for cell in cells.values())]
    proved = ["bound", "gap", "hosted GiB"] if JOINT in shown else []
    lines = head(["step", "ops", "f", *shown, *proved, "seconds"])
    for name, f in dict.fromkeys(tuple(key.split("|")[1:3]) for key in cells):
        found = {one: cells.get(f"plan|{name}|{f}|{one}") for one in shown}
        overheads = [_overhead(cell) for cell in found.values()]
        ops = str(results.graphs[name]["ops"])
        bound = _bound(found[JOINT]) if JOINT in shown else []
        lines.append(row([name, ops, f, *overheads, *bound, _seconds(found)]))
    return lines


def first_lines(results: Results) -> list[str]:
    """One row a step: seconds until the first plan, and until the last."""
    lines = head(["step", "ops", "first plan s", "all s", "overhead", "bound", "gap"])
    for key, cell in results.cells.items():
        if key.startswith("first|"):
            name, ops = cell["graph"], str(results.graphs[cell["graph"]]["ops"])
            seconds = [f"{cell['first_s']:.1f}", f"{cell['seconds']:.1f}"]
            lines.append(row([name, ops, *seconds, _overhead(cell), *_bound(cell)[:2]]))
    return lines


def sweep_lines(results: Results) -> list[str]:
    """One row a step: overheads by the rate of its links."""
    cells = [cell for key, cell in results.cells.items() if key.startswith("sweep|")]
    rates = sorted({cell["gb_s"] for cell in cells})
    lines = head(["step", "planner", *(f"{rate:g} GB/s" for rate in rates)])
    for name, planner in dict.fromkeys((cell["graph"], cell["solver"]) for cell in cells):
        own = {c["gb_s"]: c for c in cells if (c["graph"], c["solver"]) == (name, planner)}
        lines.append(row([name, planner, *(_overhead(own.get(rate)) for rate in rates)]))
    return lines


def slower_lines(results: Results) -> list[str]:
    """One row a step and planned share of the rate: overheads on links of shares of the true one.

    The peak is the same on all, to the byte.
    """
    lines = head(["step", "planner", "planned for", *(f"at {share:g}" for share in SLOWER)])
    for key, cell in results.cells.items():
        if key.startswith("slower|"):
            shown = [_overhead(cell["judged"].get(str(share))) for share in SLOWER]
            planned = f"{cell['planned_share']:g}"
            lines.append(row([cell["graph"], cell["solver"], planned, *shown]))
    return lines


def _overhead(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    return "does not fit" if cell["overhead"] is None else percent(cell["overhead"])


def _bound(cell: dict[str, Any] | None) -> list[str]:
    if cell is None:
        return ["-", "-", "-"]
    bound = percent(cell["bound_overhead"])
    if cell["overhead"] is None:
        return [bound, "-", "-"]
    return [bound, percent(cell["gap"]), f"{cell['hosted_bytes'] / GIB:.2f}"]


def _seconds(found: dict[str, dict[str, Any] | None]) -> str:
    """Of each planner, in the order of the columns."""
    return " / ".join("-" if cell is None else f"{cell['seconds']:.1f}" for cell in found.values())
