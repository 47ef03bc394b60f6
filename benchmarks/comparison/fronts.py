"""Which measured rows are worth having: those that no other beats in both memory and time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

OURS = ("remat", "remat_pieces", "remat_host", "remat_compiled", "remat_step")
ON_HOST = ("save_on_cpu", "offload", "remat_host")
"""Methods that take memory of the host besides: they are compared among themselves."""
WITH_UPDATE = ("adamw", "adamw_in_backward", "remat_step")
"""Methods whose step ends with updated parameters, compared among themselves too."""
TORCHS_KEPT = "keep_all"
"""Torch's compiled step that keeps everything: no method, but the judge of others' gradients."""
CLOSE = 0.03
"""Of budgets that differ by less than this share, only one is measured."""


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
    def is_on_host(self) -> bool:
        """Whether memory of the host is taken besides."""
        return self.method in ON_HOST

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


def fronts(rows: Iterable[Row]) -> list[Row]:
    """The front of the rows that leave the host alone, then that of the others."""
    every = list(rows)
    apart = ([row for row in every if row.is_on_host is on_host] for on_host in (False, True))
    return [row for part in apart for row in front(part)]


def targets(rows: Sequence[Row], more: Sequence[int]) -> list[int]:
    """Budgets of ours: the peaks of `rows`, then `more`, each unless it is close to another.

    Peaks that others reached let the tables compare at equal peaks.
    """
    found: list[int] = []
    for peak in [*sorted(row.peak_bytes for row in rows), *more]:
        if all(abs(peak / other - 1) > CLOSE for other in found):
            found.append(peak)
    return sorted(found, reverse=True)


def best_beside(rows: Iterable[Row], other: Row) -> Row | None:
    """The fastest of the rows beside the other within its peak."""
    return best_within(beside(rows, other), other.peak_bytes)


def beside(rows: Iterable[Row], other: Row) -> list[Row]:
    """The rows that another may be compared with: on the host only if the other is."""
    return [row for row in rows if other.is_on_host or not row.is_on_host]


def best_within(rows: Iterable[Row], peak_bytes: int) -> Row | None:
    """The fastest of the rows whose peak is no higher."""
    fitting = [row for row in rows if row.is_measured and row.peak_bytes <= peak_bytes]
    return min(fitting, key=lambda row: row.over_eager, default=None)
