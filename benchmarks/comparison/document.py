"""docs/benchmarks.md, from committed results: `python -m benchmarks.comparison.document`.

With `--rows [MODEL ...]` it prints every measured row instead. A row is lost if another's step is
faster than ours at no higher peak. `causes` says why, from what was measured of both.
"""

from __future__ import annotations

import argparse
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
from benchmarks.comparison.fronts import OURS, Row, beside, best_beside, fronts
from benchmarks.comparison.page.causes import cause
from benchmarks.comparison.page.front_plot import draw
from benchmarks.comparison.page.scaling_part import scaling

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
INTRODUCTION = Path(__file__).parent / "page" / "introduction.md"
WAYS = (
    ("checkpoint", "selective", "sequential", "chunked", "adamw", "adamw_in_backward"),
    ("aot", "inductor"),
    ("save_on_cpu", "offload"),
)
"""What others do, by what it needs: eager alone, a compiler, memory of the host."""


def section(model: Model) -> Iterator[str]:
    """All rows of a model."""
    yield "\n\n".join(filter(None, (f"## {model.name}", model.description()))) + "\n"
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
    yield ""


def lowest(models: list[Model]) -> Iterator[str]:
    """The lowest peak that each way reaches with right gradients, and ours within it."""
    yield "| model | unmodified | theirs | MB, time | ours within it | MB, time |"
    yield "|---|--:|---|--:|---|--:|"
    for model in models:
        plain = [mb(row.peak_bytes) for row in model.others if row.method in ("eager", "adamw")]
        for way in WAYS:
            rows = [row for row in model.others if row.method in way and row.is_right]
            if rows:
                theirs = min(rows, key=lambda row: (row.peak_bytes, row.over_eager))
                cells = [model.name, *(plain or ["-"]), *_figures(theirs)]
                cells += _figures(best_beside(model.ours, theirs))
                yield f"| {' | '.join(cells)} |"


def _figures(row: Row | None) -> list[str]:
    if row is None:
        return ["none", "-"]
    return [title(row), f"{mb(row.peak_bytes)}, {percent(row.over_eager)}"]


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
    rows = sum(by <= NOISE for model in models for _, _, by in model.slower())
    said = f"\nOthers are faster by at most {100 * NOISE:g} % in {rows} more."
    return [said] if rows else []


_PICTURE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{0}-dark.svg">
  <img alt="Time against measured peak, a panel for each model" src="{0}-light.svg">
</picture>
"""


def part(suite: str, kept: dict[str, Any]) -> list[str]:
    """The part of the page for one file of results."""
    models = models_of(suite, kept["rows"])
    pictures = PAGE.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    draw({model.name: model.rows for model in models}, pictures, f"benchmarks-{suite}")
    last = kept.get("resumed")
    resumed = f" (resumed {last['date']}, commit {last['commit']})" if last else ""
    batches_s = kept.get("batches_seconds")
    batches_took = f", the largest batches {batches_s / 60:.0f} more" if batches_s else ""
    return [
        f"{kept['device']}; torch {kept['torch']}, Python {kept['python']}; {kept['date']}, commit "
        f"{kept['commit']}{resumed}. All rows took {kept['seconds'] / 60:.0f} minutes"
        f"{batches_took}.\n",
        _PICTURE.format(f"pictures/benchmarks-{suite}"),
        "### The lowest peak of each way\n", *lowest(models), "",
        "### Where others are faster\n", *losses(models), "",
        "### Predicted against measured\n", *fidelity(models), "",
        *(["### Largest batches\n", *batches(models, kept), ""] if "batches" in kept else []),
        "### Seconds until the first step is done, median\n", *preparation(models), "",
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


def rows(names: list[str]) -> Iterator[str]:
    """Every measured row of the named models, or of all."""
    for file in sorted(RESULTS.glob("training-*.json")):
        kept = json.loads(file.read_text())
        for model in models_of(file.name.split("-")[1], kept["rows"]):
            if not names or model.name.removesuffix(UPDATED) in names:
                yield from section(model)


def main() -> None:
    """Write the page, or print rows."""
    parser = argparse.ArgumentParser(prog="benchmarks.comparison.document", description=__doc__)
    parser.add_argument("--rows", nargs="*", metavar="MODEL", help="print all rows, write nothing")
    asked = parser.parse_args()
    if asked.rows is None:
        PAGE.write_text(page())
    else:
        print(*rows(asked.rows), sep="\n")


if __name__ == "__main__":
    main()
