"""Time against measured peak, a panel a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.comparison.fronts import OURS, Row, front

MARKS = {
    "eager": ("unmodified", "k", "*"),
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
"""Colours of Okabe and Ito, which the colour-blind can tell apart; shapes differ as well."""
COLUMNS = 3
WORST = 1.5
"""Rows that take more than 2.5 times eager's step are left out of the picture."""


def draw(models: Mapping[str, Sequence[Row]], path: Path) -> None:
    """One figure of all models; crosses are wrong gradients."""
    mpl.use("agg")
    lines = -(-len(models) // COLUMNS)
    figure, axes = plt.subplots(lines, COLUMNS, figsize=(11, 3.1 * lines), squeeze=False)
    for ax in axes.flat[len(models) :]:
        ax.set_axis_off()
    measured = {row.method for rows in models.values() for row in rows}
    for ax, (name, rows) in zip(axes.flat, models.items(), strict=False):
        _panel(ax, rows, measured)
        ax.set_title(name)
    for ax in axes[-1]:
        ax.set_xlabel("measured peak, MB")
    for ax in axes[:, 0]:
        ax.set_ylabel("time over eager's, %")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.5 / (3.1 * lines), 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(ax: plt.Axes, rows: Sequence[Row], measured: Set[str]) -> None:
    for method, (label, colour, marker) in MARKS.items():
        if method not in measured:
            continue
        found = [r for r in rows if r.method == method and r.over_eager < WORST]
        xs, ys = [r.peak_bytes / 1e6 for r in found], [100 * r.over_eager for r in found]
        ax.scatter(xs, ys, c=colour, marker=marker, s=24, label=label, zorder=3)
        wrong = [(x, y) for x, y, r in zip(xs, ys, found, strict=True) if not r.is_right]
        if wrong:
            ax.scatter(*zip(*wrong, strict=True), c="k", marker="x", s=40, zorder=4)
    ours = front(r for r in rows if r.method in OURS and r.over_eager < WORST)
    ax.plot([r.peak_bytes / 1e6 for r in ours], [100 * r.over_eager for r in ours], c="#d55e00")
    ax.grid(alpha=0.3)
