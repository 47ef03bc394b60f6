"""The README's picture and table: `python -m benchmarks.first_screen`.

The picture is a plan of `examples/gpt.py` for a device of the table, so it is the same on any
machine. The table reads the measured rows of `benchmarks/results/training-cpu-*.json`. Both are
written where the README shows them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import remat
from benchmarks.comparison.compared import mb, percent
from benchmarks.comparison.fronts import Row, best_within
from remat.budgets import unmodified_step
from remat.graph_capture.graph import TrainingGraph
from remat.job.factory import load_model
from remat.schedules.palette import ROLES
from remat.schedules.schedule import Schedule
from remat.schedules.timeline import timeline

ROOT = Path(__file__).parents[1]
README, PICTURES = ROOT / "README.md", ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLE, DEVICE, BUDGET = ROOT / "examples" / "gpt.py", "l4", "60%"
MODELS = ("gpt2-small", "llama", "resnet-50", "unet", "moe")
TODAY = "checkpoint 1"
"""What people write today: a checkpoint around every block."""
BEGIN, END = "<!-- first screen -->\n", "<!-- /first screen -->\n"
MIB = 1 << 20
INK = {"light": "#222222", "dark": "#dddddd"}


def table() -> str:
    """Five models: the step as it is, with a checkpoint a block, and planned for that peak."""
    (file,) = RESULTS.glob("training-cpu-*.json")
    kept = json.loads(file.read_text())
    lines = [
        "| model | peak | every block checkpointed | time | a plan for that peak: time |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in MODELS:
        rows = [Row.read(key, row) for key, row in kept["rows"][name].items()]
        lines.append(_line(name, {row.name: row for row in rows}))
    return "\n".join([*lines, "", _said(kept), ""])


def _line(name: str, rows: dict[str, Row]) -> str:
    eager, today = rows["eager"], rows[TODAY]
    ours = best_within((row for row in rows.values() if row.method == "remat"), today.peak_bytes)
    assert ours is not None
    peaks = [f"{mb(row.peak_bytes)} MB" for row in (eager, today)]
    times = [percent(row.over_eager) for row in (today, ours)]
    return f"| {name} | {' | '.join(peaks)} | {times[0]} | **{times[1]}** |"


def _said(kept: dict[str, Any]) -> str:
    return (
        "Measured; times are over the unmodified step. All gradients equal eager's "
        f"([more](docs/benchmarks.md)).\n{kept['device']}; torch {kept['torch']}; "
        f"{kept['date']}; `python -m benchmarks.first_screen` writes picture and table."
    )


def planned() -> tuple[TrainingGraph, Schedule]:
    """The example, and its plan."""
    job = load_model(f"{EXAMPLE}:factory")
    graph = remat.capture(job.model, job.args, job.kwargs, device=DEVICE)
    schedule = remat.solve(graph, BUDGET, solver="cut", gap=0.0).schedule
    assert schedule is not None
    return graph, schedule


def draw(graph: TrainingGraph, schedule: Schedule, path: Path, ink: str) -> None:
    """Memory of the unmodified step and of the plan through the time of each."""
    mpl.use("agg")
    mpl.rcParams |= {"svg.hashsalt": "remat", "svg.fonttype": "path", "font.size": 9}
    figure, ax = plt.subplots(figsize=(7.6, 2.7))
    step = unmodified_step(graph)
    eager = step.graph, step.result.schedule
    for (one, steps), name, label in (
        (eager, "unmodified", "the unmodified step"), ((graph, schedule), "plan", "the plan")
    ):  # fmt: skip
        assert steps is not None
        line = timeline(one, steps)
        top = np.append(line.live_bytes, line.live_bytes[-1:]) / MIB
        ax.fill_between(line.edges, top, step="post", color=ROLES[name], alpha=0.55, lw=0)
        peak = line.simulation.peak_bytes / MIB
        ax.plot([], [], color=ROLES[name], lw=6, alpha=0.55, label=f"{label}: {peak:.0f} MiB")
    limit = schedule.budget_bytes / MIB
    ax.axhline(limit, color=ROLES["budget"], ls="--", lw=1.2, label=f"the budget: {limit:.0f} MiB")
    ax.set(xlabel="time in the step (ms)", ylabel="memory (MiB)")
    ax.set_xlim(0)
    ax.set_ylim(0)
    ax.legend(frameon=False, labelcolor=ink, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.tick_params(colors=ink)
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set_color(ink)
    for side, spine in ax.spines.items():
        spine.set_color(ink)
        spine.set_visible(side in ("left", "bottom"))
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def written_into(text: str) -> str:
    """The README with this table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    """Write the pictures and the table."""
    graph, schedule = planned()
    for theme, ink in INK.items():
        draw(graph, schedule, PICTURES / f"step-{theme}.svg", ink)
    README.write_text(written_into(README.read_text()))


if __name__ == "__main__":
    main()
