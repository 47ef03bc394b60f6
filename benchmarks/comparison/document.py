"""docs/benchmarks.md, from committed results: `python -m benchmarks.comparison.document`.

A row is lost if another's step is faster than ours at no higher peak. `causes` says why, from what
was measured of both.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.comparison.compared import (
    NOISE,
    TITLES,
    UPDATED,
    Model,
    mb,
    models_of,
    overhead_off,
    percent,
    title,
)
from benchmarks.comparison.fronts import OURS, beside, best_beside, fronts
from benchmarks.comparison.page.causes import cause
from benchmarks.comparison.page.front_plot import draw
from benchmarks.comparison.page.scaling_part import scaling

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
INTRODUCTION = Path(__file__).parent / "page" / "introduction.md"


def section(model: Model) -> Iterator[str]:
    """The rows of a model, and a table at equal peaks."""
    yield "\n\n".join(filter(None, (f"### {model.name}", model.description()))) + "\n"
    yield "| step | peak MB | time | gradients | on the front |"
    yield "|---|--:|--:|---|---|"
    on_front = {id(row) for row in fronts(model.rows)}
    for row in sorted(model.rows, key=lambda r: -r.peak_bytes):
        right = "right" if row.is_right else f"**wrong** ({row.kept['gradient_error']:.2g})"
        yield (
            f"| {title(row)} | {mb(row.peak_bytes)} | {percent(row.over_eager)} | {right} | "
            f"{'yes' if id(row) in on_front else ''} |"
        )
    for row in model.failed:
        yield f"| {title(row)} | - | - | {row.kept['error'].partition('. ')[0][:100]} | |"
    yield "\nAt equal peaks:\n"
    yield "| theirs | peak MB | time | ours within it | peak MB | time |"
    yield "|---|--:|--:|---|--:|--:|"
    for row in fronts(model.others):
        ours = best_beside(model.ours, row)
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
    for methods, name in (*(((m,), TITLES[m]) for m in OURS), (OURS, "all")):
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
    yield "Rows are set up side by side, so these do not compare methods.\n"
    models = [model for model in models if not model.name.endswith(UPDATED)]
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


def losses(models: list[Model]) -> list[str]:
    """The table of lost rows with their causes."""
    lines = [
        "| model | theirs | ours within its peak | slower by | cause |",
        "|---|---|---|--:|---|",
    ]
    for model in models:
        for row, ours, by in model.losses():
            least = min((one.peak_bytes for one in beside(model.ours, row)), default=None)
            lines.append(
                f"| {model.name} | {title(row)}, {mb(row.peak_bytes)} MB | "
                f"{title(ours) if ours else 'none'} | {percent(by) if ours else '-'} | "
                f"{cause(row, ours, least)} |"
            )
    return [*(lines if len(lines) > 2 else ["None."]), *within_noise(models)]


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


def part(suite: str, kept: dict[str, Any]) -> list[str]:
    """The part of the page for one file of results."""
    models = models_of(suite, kept["rows"])
    picture = PAGE.parent / "pictures" / f"benchmarks-{suite}.png"
    picture.parent.mkdir(exist_ok=True)
    draw({model.name: model.rows for model in models}, picture)
    last = kept.get("resumed")
    resumed = f" (resumed {last['date']}, commit {last['commit']})" if last else ""
    batches_s = kept.get("batches_seconds")
    batches_took = f", the largest batches {batches_s / 60:.0f} more" if batches_s else ""
    return [
        f"{kept['device']}; torch {kept['torch']}, Python {kept['python']}; {kept['date']}, commit "
        f"{kept['commit']}{resumed}. All rows took {kept['seconds'] / 60:.0f} minutes"
        f"{batches_took}.\n",
        f"![Time against measured peak of each model](pictures/{picture.name})\n",
        "#### Losses\n", *losses(models), "",
        "#### Predicted against measured\n", *fidelity(models), "",
        *(["#### Largest batches\n", *batches(models, kept), ""] if "batches" in kept else []),
        "#### Seconds until the first step is done, median\n", *preparation(models), "",
        *(line for model in models for line in section(model)),
    ]  # fmt: skip


def page() -> str:
    """The page."""
    text = [INTRODUCTION.read_text()]
    for suite, heading in (("cpu", "On a CPU"), ("gpu", "On a GPU")):
        text.append(f"## {heading}\n")
        files = sorted(RESULTS.glob(f"training-{suite}-*.json"))
        if not files:
            text.append("Not yet measured.\n")
        for file in files:
            text += part(suite, json.loads(file.read_text()))
    for file in sorted(RESULTS.glob("scaling-*.json")):
        text += ["## Cost of a plan against the size of the graph\n"]
        text += scaling(json.loads(file.read_text()))
    return "\n".join(text).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
