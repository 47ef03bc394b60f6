"""Which of the measured rows are worth having: none other has both less memory and less time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

OURS = ("remat", "remat_compiled")
TORCHS_KEPT = "keep_all"
"""Torch's compiled step that keeps everything: a row that others are held against, no method."""
CLOSE = 0.03
"""Budgets within this share of each other are measured once."""


@dataclass(frozen=True)
class Row:
    """A measured step: bytes at its peak and time over that of the unmodified step."""

    method: str
    amount: float
    kept: dict[str, Any]

    @classmethod
    def read(cls, name: str, kept: dict[str, Any]) -> Row:
        """From its name and what the file keeps of it."""
        method, _, amount = name.partition(" ")
        return cls(method, float(amount or 0), kept)

    @property
    def name(self) -> str:
        """As the file calls it."""
        return f"{self.method} {self.amount:.10g}" if self.amount else self.method

    @property
    def is_measured(self) -> bool:
        """Whether there are figures."""
        return "error" not in self.kept

    @property
    def peak_bytes(self) -> int:
        """Measured."""
        return self.kept["peak_bytes"]

    @property
    def over_eager(self) -> float:
        """Time over the unmodified step's, minus one."""
        return self.kept["over_eager"]

    @property
    def is_right(self) -> bool:
        """Whether its gradients are those of the step that keeps everything."""
        return self.kept.get("is_right", True)


def front(rows: Iterable[Row]) -> list[Row]:
    """The rows that no other beats or equals in both, largest peak first."""
    found: list[Row] = []
    for row in sorted(
        (r for r in rows if r.is_measured), key=lambda r: (r.peak_bytes, r.over_eager)
    ):
        if not found or row.over_eager < found[-1].over_eager:
            found.append(row)
    return found[::-1]


def targets(rows: Sequence[Row], more: Sequence[int]) -> list[int]:
    """Peaks of rows, but for those a little above another, and those of `more` close to none."""
    found: list[int] = []
    for peak in [*sorted(row.peak_bytes for row in rows), *more]:
        if all(abs(peak / other - 1) > CLOSE for other in found):
            found.append(peak)
    return sorted(found, reverse=True)


def best_within(rows: Iterable[Row], peak_bytes: int) -> Row | None:
    """The fastest of the rows whose peak is no higher."""
    fitting = [row for row in rows if row.is_measured and row.peak_bytes <= peak_bytes]
    return min(fitting, key=lambda row: row.over_eager, default=None)
