"""The measured rows of a model, ours beside those of others, and how rows are named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.comparison.fronts import OURS, TORCHS_KEPT, WITH_UPDATE, Row, best_beside, fronts
from benchmarks.comparison.models import SUITES

NOISE = 0.02
"""Ours counts as slower from this on: two processes that run the same step differ by as much."""
TITLES = {
    "eager": "unmodified", "checkpoint": "checkpoint, every", "selective": "selective checkpoint",
    "sequential": "checkpoint_sequential", "sac_ilp": "sac_ilp", "aot": "compile, eager-like",
    "inductor": "compile, Inductor", "save_on_cpu": "save_on_cpu",
    "offload": "save_on_cpu, block every", "chunked": "loss in chunks,",
    "adamw": "unmodified, then AdamW", "adamw_in_backward": "AdamW in hooks",
    "remat": "**remat**", "remat_pieces": "**remat, head in chunks**",
    "remat_host": "**remat, host**", "remat_compiled": "**remat, compiled**",
    "remat_step": "**remat, optimizer in backward**",
}  # fmt: skip
COUNTED = ("checkpoint", "offload", "chunked")
"""Methods whose amount is a number of blocks or chunks."""
UPDATED = ", with AdamW"
"""Marks the name of a model whose steps end with an update."""


def title(row: Row) -> str:
    """The name of a row in the tables."""
    if row.method in ("aot", "inductor"):
        return f"{TITLES[row.method]}" + ("" if row.amount == 1 else f", budget {row.amount:g}")
    return TITLES[row.method] + (f" {row.amount:g}" if row.method in COUNTED else "")


def mb(size_bytes: float) -> str:
    """MB of 10⁶ bytes."""
    return f"{size_bytes / 1e6:.1f}"


def percent(share: float) -> str:
    """A share with its sign."""
    return f"{100 * share:+.1f} %"


class Model:
    """The rows of one model."""

    def __init__(self, suite: str, name: str, kept: dict[str, Any]) -> None:
        self.name, self.entry = name, SUITES[suite][name.removesuffix(UPDATED)]
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
        for row in fronts(self.others):
            ours = best_beside(self.ours, row)
            by = (1 + ours.over_eager) / (1 + row.over_eager) - 1 if ours else math.inf
            if by > 0:
                yield row, ours, by

    def losses(self) -> list[tuple[Row, Row | None, float]]:
        """The rows of others that are faster by more than the noise."""
        return [each for each in self.slower() if each[2] > NOISE]

    def description(self) -> str:
        """What the model is, and its sizes in this suite; nothing where that stands before."""
        if self.name.endswith(UPDATED):
            return ""
        build: Any = self.entry.build
        sizes = ", ".join(f"{key} {value}" for key, value in build.keywords.items())
        return f"{build.func.__doc__.strip()} Sizes: {sizes}; batch {self.entry.batch}."


def models_of(suite: str, kept: dict[str, dict[str, Any]]) -> list[Model]:
    """The models of a file; steps that end with an update are a model of their own."""
    found: list[Model] = []
    for name, rows in kept.items():
        with_update = {key: row for key, row in rows.items() if key.split()[0] in WITH_UPDATE}
        found.append(
            Model(suite, name, {k: row for k, row in rows.items() if k not in with_update})
        )
        if with_update:
            found.append(Model(suite, name + UPDATED, with_update))
    return found


def overhead_off(row: Row) -> float:
    """Planned less measured overhead over the step that keeps everything, in the same process."""
    return row.kept["planned_overhead"] - row.kept["measured_overhead"]
