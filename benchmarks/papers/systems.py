"""docs/systems.md: `python -m benchmarks.papers.systems` makes it of systems.toml and kept results.

A figure is named by its kind and what it is of, such as ``solver dtr``. Each kind reads one file of
benchmarks/results, or counts what our code makes; some also know the paper's figure.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import table as cluster_table
from benchmarks.papers import tiers
from benchmarks.papers.published import JOBS
from benchmarks.papers.rebuilt import Line
from benchmarks.solver_table import solver_lines
from remat.formats import percent_text
from remat.graph_capture.files import write_contents
from remat.solver.segments.revolve import binomial_actions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"
RESULTS = FOLDER / "papers.json"
PAGE = ROOT / "docs" / "systems.md"
INTRODUCTION, ROWS = (Path(__file__).with_name(name) for name in ("systems.md", "systems.toml"))
WAYS, TOGETHER = (ROOT / "docs" / f"{name}.md" for name in ("distributed", "together"))
Said = tuple[str, str]
"""Our figure and the paper's; the latter is empty where a row states it itself."""
MB, GIVEN = 1e6, "-"


def kept_lines() -> list[Line]:
    """The lines that were solved."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return msgspec.convert(kept, list[Line])


def write_lines(lines: Sequence[Line]) -> None:
    """Keep them, in the order of the jobs."""
    order = [job.name for job in JOBS]
    found = sorted(lines, key=lambda line: (order.index(line.job), -line.budget_share, line.name))
    write_contents(RESULTS, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


@cache
def _kept(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


@cache
def _solvers() -> dict[str, list[str]]:
    rows = map(_cells_of, solver_lines(list(_kept("solvers")["cells"].values())))
    return {cells[0].strip("`"): cells for cells in rows}


def _cells_of(row: str) -> list[str]:
    return row.strip("| ").split(" | ")


def _solver(name: str) -> Said:
    _, _, found, _, over, _ = _solvers()[name]
    return f"+{over}, {found.split()[0]} found", ""


def _copies(planner: str) -> Said:
    overhead = _kept("offload")["cells"][f"plan|gpt15-rtx4090|0.3|{planner}"]["overhead"]
    return f"+{percent_text(overhead)}", ""


def _checkpoint(way: str) -> Said:
    row = _kept("training-cpu-intel-xeon")["rows"]["gpt2-small"][way]
    return f"{row['peak_bytes'] / MB:.1f} MB, {100 * row['over_eager']:+.1f} %", ""


def _cluster(job: str) -> Said:
    cells = _cells_of(cluster_table.table({job: _kept("cluster")[job]}).splitlines()[2])
    return cells[3], f"{cells[2]}: {job}"


def _line(name: str) -> Said:
    one = next(one for one in kept_lines() if one.name == name)
    at = "" if name.endswith("%") else f", {100 * one.budget_share:.0f} %"
    return _overheads(one)[0], f"{percent_text(one.published)}: {name}{at}"


def _levers(name: str) -> Said:
    model, lever = name.split("/")
    (one,) = (one for one in _kept("levers") if (one["model"], one["lever"]) == (model, lever))
    share = one["least_bytes"] / one["unmodified_bytes"] - 1
    return f"{100 * share:.0f} % peak", ""


def _orders(ops: str) -> Said:
    (cells,) = re.findall(rf"^\| {ops} \|.*$", (ROOT / "docs" / "solvers.md").read_text(), re.M)
    _, _, given, _, free, _ = _cells_of(cells)
    return f"+{free}, given order +{given}", ""


def _places(_: str) -> Said:
    found = _kept("layouts-numba-cpu-intel-xeon")["instances"]
    return f"{sum(one['is_solved'] for one in found)} of {len(found)}", ""


def _reserved(kind: str) -> Said:
    cell = _kept("reserved")["cells"]["resnet50|50%"]
    return f"+{percent_text(cell['reserved_bytes'][kind] / cell['peak_bytes'] - 1)}", ""


def _ranks(name: str) -> Said:
    (row,) = re.findall(rf"^\|{re.escape(name)}\|.*$", WAYS.read_text(), re.M)
    return row.split("|")[5], ""  # of FSDP2, planned with a batch


def _pairs(lever: str) -> Said:
    (row,) = re.findall(rf"^\|[^|]* {lever}\|.*$", TOGETHER.read_text(), re.M)
    return f"{row.split('|').count('=')} levers beside it, to the bit", ""


def _tested(path: str) -> Said:
    return f"[tested](../{path})", ""


def _revolve(name: str) -> Said:
    stages, slots = map(int, name.split("/"))
    runs = [one for one in binomial_actions(stages, slots) if one.kind in ("forward", "save")]
    return str(len(runs)), ""


def _tiers(name: str) -> Said:
    case, system = name.rsplit("/", 1)
    (one, *_) = [
        one for one in tiers.PUBLISHED if one.case == case and (one.system or "ours") == system
    ]
    return tiers.step_text(tiers.kept_cases()[case]["steps"][system]), one.figure


KINDS: dict[str, Callable[[str], Said]] = {
    "solver": _solver, "copies": _copies, "checkpoint": _checkpoint, "cluster": _cluster,
    "line": _line, "levers": _levers, "orders": _orders, "places": _places, "reserved": _reserved,
    "ranks": _ranks, "pairs": _pairs, "tested": _tested, "revolve": _revolve, "tiers": _tiers,
}  # fmt: skip


def parts() -> list[dict[str, Any]]:
    """The tables, each with a title and its rows."""
    return tomllib.loads(ROWS.read_text())["part"]


def text_of(lines: Sequence[Line]) -> str:
    """The page; `lines` of the published tables at its end."""
    found = [INTRODUCTION.read_text()]
    for part in parts():
        found += [f"## {part['title']}\n", *_rows(part["rows"]), ""]
    return "\n".join([*found, *_published(lines)]).rstrip() + "\n"


def _rows(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from ("|system|met at|ours|paper's|ends|", "|---|---|---|---|---|")
    for system, met, figure, paper, end in rows:
        kind, _, of = figure.partition(" ")
        ours, known = KINDS[kind](of) if kind != GIVEN else ("none", "")
        yield f"|{'|'.join((system, met, ours, known or paper, end))}|"


def _published(lines: Sequence[Line]) -> Iterator[str]:
    """Published overheads beside ours for the same shapes and budgets."""
    yield "## Published tables\n"
    yield (
        "Overheads of rebuilt models in the bytes that each paper had, over the step that keeps "
        "all; DeepCompile's over all offloaded. **All of ours are modelled; nothing was run**: "
        "`python -m benchmarks.papers`. *Its rule* replays DTR's policy, or offloads all.\n"
    )
    yield from ("|model|budget|by|published|its rule|ours|bound|", "|---|---|---|---|---|---|---|")
    for job in JOBS:
        for one in (one for one in lines if one.job == job.name):
            yield f"|{'|'.join(_cells(job.table, one))}|"
    yield f"\n{_made_of(lines)}"


def _cells(table: str, one: Line) -> list[str]:
    limit = "≤ " if table == "batch" else ""
    rule = "-" if one.policy_overhead is None else percent_text(one.policy_overhead)
    published = f"{limit}{percent_text(one.published)}"
    by, share = one.by.partition(", measured")[0], f"{100 * one.budget_share:.0f} %"
    return [one.name, share, by, published, rule, *_overheads(one)]


def _overheads(one: Line) -> list[str]:
    """Ours and the bound; over the step that offloads all where the published one is."""
    table = next(job.table for job in JOBS if job.name == one.job)
    beside = (one.policy_overhead or 0.0) if table == "offload" else 0.0
    return [
        "nothing found" if share is None else percent_text((1 + share) / (1 + beside) - 1)
        for share in (one.overhead, one.bound_overhead)
    ]


def _made_of(lines: Sequence[Line]) -> str:
    sources = "; ".join(dict.fromkeys(job.source for job in JOBS))
    versions = {f"{name} {what}" for line in lines for name, what in line.versions.items()}
    dates, commits = ({getattr(line, name) for line in lines} for name in ("date", "commit"))
    made = ", ".join(
        sorted(versions) + sorted(dates) + [f"commit {one}" for one in sorted(commits)]
    )
    return f"Sources: {sources}. Ours: {made}."


if __name__ == "__main__":
    PAGE.write_text(text_of(kept_lines()))
