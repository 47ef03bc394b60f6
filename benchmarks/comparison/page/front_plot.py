"""Time against measured peak, a panel for each model, for light pages and for dark ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.comparison.fronts import OURS, Row, front

MARKS = {
    "eager": ("unmodified", "", "*"),
    "checkpoint": ("checkpoint", "#0072b2", "o"),
    "selective": ("selective", "#56b4e9", "s"),
    "sequential": ("sequential", "#009e73", "^"),
    "aot": ("compile, eager-like", "#cc79a7", "v"),
    "inductor": ("compile, Inductor", "#e69f00", "D"),
    "save_on_cpu": ("save_on_cpu", "#999999", "P"),
    "offload": ("save_on_cpu, blocks", "#999999", "X"),
    "chunked": ("loss in chunks", "#f0e442", "h"),
    "remat": ("remat", "#d55e00", "o"),
    "remat_pieces": ("remat, head in chunks", "#d55e00", "h"),
    "remat_host": ("remat, host", "#d55e00", "P"),
    "remat_compiled": ("remat, compiled", "#8b2500", "D"),
}
"""Colours of Okabe and Ito, which the colour-blind can tell apart; the ink where there is none."""
INKS = {"light": "#222222", "dark": "#dddddd"}
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
NO_DATE = {"Date": None}
COLUMNS = 3
WORST = 1.5
"""Rows that take more than 2.5 times eager's step are left out of the picture."""


def draw(models: Mapping[str, Sequence[Row]], folder: Path, name: str) -> None:
    """A figure of all models for each scheme; crosses are wrong gradients."""
    for scheme, ink in INKS.items():
        with mpl.rc_context(in_ink(ink)):
            figure = _figure(panels(models), ink)
            figure.savefig(folder / f"{name}-{scheme}.svg", transparent=True, metadata=NO_DATE)


def in_ink(ink: str) -> dict[str, Any]:
    """Settings of matplotlib with which texts and frames have this colour, on any ground."""
    ground = {"axes.facecolor": "none", "figure.facecolor": "none", "legend.facecolor": "none"}
    return {**dict.fromkeys(INKED, ink), **ground, "svg.hashsalt": "remat"}


def panels(models: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """The rows of each model that have a mark and are not far above the others."""
    shown = {
        name: [row for row in rows if row.method in MARKS and row.over_eager < WORST]
        for name, rows in models.items()
    }
    return {name: rows for name, rows in shown.items() if rows}


def _figure(models: Mapping[str, Sequence[Row]], ink: str) -> Figure:
    lines = -(-len(models) // COLUMNS)
    figure = Figure(figsize=(11, 3.1 * lines + 1), layout="constrained")
    axes = figure.subplots(lines, COLUMNS, squeeze=False)
    for ax in axes.flat[len(models) :]:
        ax.set_axis_off()
    for ax, (model, rows) in zip(axes.flat, models.items(), strict=False):
        _panel(ax, rows, ink)
        ax.set(title=model, xlabel="measured peak (MB)", ylabel="time over eager's (%)")
    named = {label: mark for ax in axes.flat for mark, label in zip(*_legend(ax), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _legend(ax: Axes) -> tuple[list[Artist], list[str]]:
    return ax.get_legend_handles_labels()


def _panel(ax: Axes, rows: Sequence[Row], ink: str) -> None:
    for method, (label, colour, marker) in MARKS.items():
        found = [(r.peak_bytes / 1e6, 100 * r.over_eager) for r in rows if r.method == method]
        if found:
            ax.scatter(*zip(*found, strict=True), c=colour or ink, marker=marker, s=24, label=label)
    wrong = [(r.peak_bytes / 1e6, 100 * r.over_eager) for r in rows if not r.is_right]
    if wrong:
        ax.scatter(*zip(*wrong, strict=True), c=ink, marker="x", s=40, label="wrong gradients")
    ours = front(r for r in rows if r.method in OURS)
    ax.plot([r.peak_bytes / 1e6 for r in ours], [100 * r.over_eager for r in ours], c="#d55e00")
    ax.grid(alpha=0.3)
