"""Published times beside predicted ones: in a terminal, as kept results, and in the docs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.published.steps import Case, Step, predicted_ms, read_cases
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.devices.known_devices import modelled_device

RESULTS = Path(__file__).parents[2] / "results" / "published" / "rows.json"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "gpu_not_here.md"
BEGIN, END = "<!-- published -->\n", "<!-- /published -->\n"
SIDES = ("fitted", "held out")
_HEAD = (
    "| models | GPU | published over predicted, fitted | held out |",
    "|---|---|--:|--:|",
)  # fmt: skip

Rows = dict[str, dict[str, Any]]


def rows_of(known: Mapping[str, tuple[Case, Step]]) -> Rows:
    """By name: what was published, what is predicted, and the one over the other."""
    return {name: _row(case, step) for name, (case, step) in known.items()}


def _row(case: Case, step: Step) -> dict[str, Any]:
    ms = predicted_ms(case, step, Roofline.assumed(modelled_device(case.device)))
    return {
        "family": case.family, "device": case.device, "published_ms": case.published_ms,
        "predicted_ms": round(ms, 1), "ratio": round(case.published_ms / ms, 3),
        "side": case.side, "source": case.source,
    }  # fmt: skip


def off(row: dict[str, Any]) -> float:
    """How many times too long or too short."""
    return max(row["ratio"], 1 / row["ratio"])


def lines(rows: Rows) -> list[str]:
    """All rows, what they tell, and what is to be known of them."""
    found = [f"{'case':34}{'published':>10}{'predicted':>10}{'ratio':>7}  {'':9} source"]
    for name, row in rows.items():
        times = f"{row['published_ms']:10.1f}{row['predicted_ms']:10.1f}{row['ratio']:7.2f}"
        found.append(f"{name:34}{times}  {row['side']:9} {row['source']}")
    return [*found, *(summary(rows, side) for side in SIDES), *read_cases().notes]


def summary(rows: Rows, side: str) -> str:
    """How far off one side is."""
    errors = [off(row) for row in rows.values() if row["side"] == side]
    if not errors:
        return f"{side}: none"
    median, most = statistics.median(errors), max(errors)
    return f"{side}: {len(errors)} steps, off by {median:.2f} in the median, at most {most:.2f}"


def keep(rows: Rows) -> None:
    """As results, and in the docs."""
    facts = {"torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d")}
    RESULTS.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table(rows)}{END}{after}")


def table(rows: Rows) -> str:
    """For the docs: a row for each family on each GPU."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows.values():
        groups.setdefault((row["family"], row["device"]), []).append(row)
    told = [
        f"| {family} | {device} | {_ratios(group, 'fitted')} | {_ratios(group, 'held out')} |"
        for (family, device), group in groups.items()
    ]
    errors = (summary(rows, side).partition(", ")[2] for side in SIDES)
    return "\n".join([*_HEAD, *told, f"| all | | {' | '.join(errors)} |", ""])


def _ratios(group: list[dict[str, Any]], side: str) -> str:
    return " ".join(f"{row['ratio']:.2f}" for row in group if row["side"] == side) or "-"
