"""docs/benchmarks.md, from committed results: `python -m benchmarks.comparison.document`.

A row is lost if another's step is faster than ours at no higher peak. The program writes nothing
and ends with status 1 if a lost row has no cause in `benchmarks/comparison/causes.py`, or if a
cause is there for a row that is not lost.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.comparison import causes
from benchmarks.comparison.front_plot import draw
from benchmarks.comparison.fronts import OURS, TORCHS_KEPT, Row, best_within, front
from benchmarks.comparison.models import SUITES
from benchmarks.comparison.scaling_part import scaling

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
INTRODUCTION = Path(__file__).with_name("introduction.md")
NOISE = 0.02
"""Ours counts as slower from this on: two processes that run the same step differ by as much."""
TITLES = {
    "eager": "unmodified", "checkpoint": "checkpoint, every", "selective": "selective checkpoint",
    "sequential": "checkpoint_sequential", "sac_ilp": "sac_ilp", "aot": "compile, eager-like",
    "inductor": "compile, Inductor", "remat": "**remat**", "remat_compiled": "**remat, compiled**",
}  # fmt: skip


def title(row: Row) -> str:
    """The name of a row in the tables."""
    if row.method in ("aot", "inductor"):
        return f"{TITLES[row.method]}" + ("" if row.amount == 1 else f", budget {row.amount:g}")
    return TITLES[row.method] + (f" {row.amount:g}" if row.method == "checkpoint" else "")


def mb(size_bytes: float) -> str:
    """MB of 10⁶ bytes."""
    return f"{size_bytes / 1e6:.1f}"


def percent(share: float) -> str:
    """A share with its sign."""
    return f"{100 * share:+.1f} %"


class Model:
    """The rows of one model."""

    def __init__(self, suite: str, name: str, kept: dict[str, Any]) -> None:
        self.name, self.entry = name, SUITES[suite][name]
        read = [Row.read(key, row) for key, row in kept.items()]
        every = [row for row in read if row.method != TORCHS_KEPT]
        self.rows = [row for row in every if row.is_measured]
        self.failed = [row for row in every if not row.is_measured]
        self.ours = [row for row in self.rows if row.method in OURS]
        self.others = [row for row in self.rows if row.method not in OURS]

    def slower(self) -> Iterator[tuple[Row, Row | None, float]]:
        """Each row of others that is faster than ours at its peak, our row, and by how much.

        Without a row of ours it is faster by infinity.
        """
        for row in front(self.others):
            ours = best_within(self.ours, row.peak_bytes)
            by = (1 + ours.over_eager) / (1 + row.over_eager) - 1 if ours else math.inf
            if by > 0:
                yield row, ours, by

    def losses(self) -> list[tuple[Row, Row | None, float]]:
        """The rows of others that are faster by more than the noise."""
        return [each for each in self.slower() if each[2] > NOISE]

    def description(self) -> str:
        """What the model is, and the sizes that it has in this suite."""
        build: Any = self.entry.build
        sizes = ", ".join(f"{key} {value}" for key, value in build.keywords.items())
        return f"{build.func.__doc__.strip()} Sizes: {sizes}; batch {self.entry.batch}."


def overhead_off(row: Row) -> float:
    """Planned less measured overhead over the step that keeps everything, in the same process."""
    return row.kept["planned_overhead"] - row.kept["measured_overhead"]


def section(model: Model) -> Iterator[str]:
    """The rows of a model, and a table at equal peaks."""
    yield f"### {model.name}\n\n{model.description()}\n"
    yield "| step | peak MB | time | gradients | on the front |"
    yield "|---|--:|--:|---|---|"
    on_front = {id(row) for row in front(model.rows)}
    for row in sorted(model.rows, key=lambda r: -r.peak_bytes):
        right = "right" if row.is_right else f"**wrong** ({row.kept['gradient_error']:.2g})"
        yield (
            f"| {title(row)} | {mb(row.peak_bytes)} | {percent(row.over_eager)} | {right} | "
            f"{'yes' if id(row) in on_front else ''} |"
        )
    for row in model.failed:
        yield f"| {title(row)} | - | - | {row.kept['error'].partition('. ')[0][:100]} | |"
    yield "\nAt equal measured peak, each row that no other of theirs beats:\n"
    yield "| theirs | peak MB | time | ours within it | peak MB | time |"
    yield "|---|--:|--:|---|--:|--:|"
    for row in front(model.others):
        ours = best_within(model.ours, row.peak_bytes)
        beside = (
            f"{title(ours)} | {mb(ours.peak_bytes)} | {percent(ours.over_eager)}"
            if ours
            else "none | - | -"
        )
        yield f"| {title(row)} | {mb(row.peak_bytes)} | {percent(row.over_eager)} | {beside} |"
    yield ""


def fidelity(models: list[Model]) -> Iterator[str]:
    """Predicted against measured."""
    yield "| | rows | peak off, median | worst | overhead off, median | worst |"
    yield "|---|--:|--:|--:|--:|--:|"
    every = [row for model in models for row in model.ours]
    for methods, name in (*(((m,), TITLES[m]) for m in OURS), (OURS, "both")):
        rows = [row for row in every if row.method in methods]
        if not rows:
            continue
        peaks = [abs(row.kept["predicted_bytes"] / row.peak_bytes - 1) for row in rows]
        overheads = [abs(overhead_off(row)) for row in rows]
        off = [f"{100 * f(peaks):.2f} %" for f in (statistics.median, max)]
        off += [f"{100 * f(overheads):.1f} points" for f in (statistics.median, max)]
        yield f"| {name} | {len(rows)} | {' | '.join(off)} |"


def preparation(models: list[Model]) -> Iterator[str]:
    """Seconds before the first step is done."""
    yield (
        "Rows are set up side by side on the same cores: these are longer than a row alone takes, "
        "and do not compare methods. On a CPU, what compilers first import is imported before.\n"
    )
    yield "| | " + " | ".join(model.name for model in models) + " |"
    yield "|---|" + "--:|" * len(models)
    for method in ("checkpoint", "aot", "inductor", "remat", "remat_compiled"):
        cells = [
            statistics.median([r.kept["setup_s"] for r in model.rows if r.method == method] or [0])
            for model in models
        ]
        yield (
            f"| {TITLES[method].removesuffix(', every')} | "
            + " | ".join(f"{s:.1f}" for s in cells)
            + " |"
        )


def batches(models: list[Model], kept: dict[str, Any]) -> Iterator[str]:
    """The largest batch within a budget, by the overhead that is allowed."""
    columns = ("10 %, theirs", "10 %, ours", "30 %, theirs", "30 %, ours")
    yield f"| model | budget MB | unmodified | {' | '.join(columns)} |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for model in models:
        for budget, rows in kept.get("batches", {}).get(model.name, {}).items():
            found = {name: row for name, row in rows.items() if row.get("batch")}
            theirs = {name: row for name, row in found.items() if not name.startswith("remat")}
            cells = [str(found["eager"]["batch"]) if "eager" in found else "-"]
            for allowed in (0.1, 0.3):
                fitting = [(r["batch"], n) for n, r in theirs.items() if r["over_eager"] <= allowed]
                cells.append("{} ({})".format(*max(fitting)) if fitting else "-")
                cells.append(str(found.get(f"remat {allowed}", {}).get("batch", "-")))
            yield f"| {model.name} | {mb(int(budget))} | {' | '.join(cells)} |"


def losses(suite: str, models: list[Model]) -> tuple[list[str], list[str]]:
    """The table of lost rows with their causes, and what is wrong with the causes."""
    lines, wrong = (
        ["| model | theirs | ours within its peak | slower by | cause |", "|---|---|---|--:|---|"],
        [],
    )
    named: set[tuple[str, str, str]] = set()
    for model in models:
        for row, ours, by in model.losses():
            key = (suite, model.name, row.name)
            named.add(key)
            cause = causes.CAUSES.get(key)
            if cause is None:
                wrong.append(f"no cause is written down for {key}")
                continue
            lines.append(
                f"| {model.name} | {title(row)}, {mb(row.peak_bytes)} MB | "
                f"{title(ours) if ours else 'none'} | {percent(by) if ours else '-'} | {cause} |"
            )
    wrong += [f"{key} is not lost" for key in causes.CAUSES if key[0] == suite and key not in named]
    return [*(lines if len(lines) > 2 else ["None."]), *within_noise(models)], wrong


def within_noise(models: list[Model]) -> list[str]:
    """A sentence on rows that are faster than ours by no more than the noise, if there are any."""
    rows = [
        f"{model.name}, {title(row)} ({percent(by)})"
        for model in models
        for row, _, by in model.slower()
        if by <= NOISE
    ]
    said = f"\nFaster than ours, but by no more than {100 * NOISE:g} %: {'; '.join(rows)}."
    return [said] if rows else []


def part(suite: str, kept: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The part of the page for one file of results, and what is wrong with it."""
    models = [Model(suite, name, rows) for name, rows in kept["rows"].items()]
    lost, wrong = losses(suite, models)
    picture = PAGE.with_name(f"benchmarks-{suite}.png")
    draw({model.name: model.rows for model in models}, picture)
    last = kept.get("resumed")
    resumed = f" (resumed {last['date']}, commit {last['commit']})" if last else ""
    batches_s = kept.get("batches_seconds")
    batches_took = f", the largest batches {batches_s / 60:.0f} more" if batches_s else ""
    return [
        f"{kept['device']}; torch {kept['torch']}, Python {kept['python']}; {kept['date']}, commit "
        f"{kept['commit']}{resumed}. All rows took {kept['seconds'] / 60:.0f} minutes"
        f"{batches_took}.\n",
        f"![Time against measured peak of each model]({picture.name})\n",
        "#### Losses\n", *lost, "",
        "#### Predicted against measured\n", *fidelity(models), "",
        *(["#### Largest batches\n", *batches(models, kept), ""] if "batches" in kept else []),
        "#### Seconds until the first step is done, median\n", *preparation(models), "",
        *(line for model in models for line in section(model)),
    ], wrong  # fmt: skip


def page() -> tuple[str, list[str]]:
    """The page and what is wrong with it."""
    text, complaints = [INTRODUCTION.read_text()], list[str]()
    for suite, heading in (("cpu", "On a CPU"), ("gpu", "On a GPU")):
        text.append(f"## {heading}\n")
        files = sorted(RESULTS.glob(f"training-{suite}-*.json"))
        if not files:
            text.append("Not yet measured.\n")
        for file in files:
            lines, wrong = part(suite, json.loads(file.read_text()))
            text += lines
            complaints += wrong
    for file in sorted(RESULTS.glob("scaling-*.json")):
        text += ["## Cost of a plan against the size of the graph\n"]
        text += scaling(json.loads(file.read_text()))
    return "\n".join(text).rstrip() + "\n", complaints


def main() -> int:
    """Write the page, or say what is missing."""
    text, complaints = page()
    if complaints:
        print("\n".join(complaints))
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
