"""What a budget may look like, and how many bytes it means."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import remat.solver as solvers
from remat.graph_capture.derived.eager import as_eager
from remat.graph_capture.devices.device_table import CPU, is_in_table, modelled_device
from remat.graph_capture.devices.here import free_bytes
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.pins.globs import Globs
from remat.solver.result import Result

RESERVE = 0.10
"""Share of the free memory that ``auto`` leaves to others."""

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_FORMS = "8GiB, 512MiB, 1.5GB, 60%, auto or min"

UNBOUNDED_BYTES = 2**62
"""A budget that binds nothing: for the schedules that a plan is compared with."""


@dataclass(frozen=True)
class Budget:
    """A budget as it was asked for.

    Attributes
    ----------
    kind : ``bytes``, ``share`` (of the unmodified peak), ``auto`` or ``min``.
    size_bytes : of kind ``bytes``. share : of kind ``share``, as a fraction.
    """

    kind: Literal["bytes", "share", "auto", "min"]
    size_bytes: int = 0
    share: float = 0.0


def parse_budget(budget: str | SupportsIndex) -> Budget:
    """Read a budget: an int is bytes, a text needs a unit, ``%``, ``auto`` or ``min``.

    Raises
    ------
    BudgetError : no unit, an unknown unit, or nothing to spend.
    """
    parsed = _parse_text(budget.strip()) if isinstance(budget, str) else _parse_int(budget)
    if parsed.kind == "bytes" and parsed.size_bytes <= 0:
        raise BudgetError(f"budget {budget!r} leaves nothing to spend: give a positive size")
    if parsed.kind == "share" and parsed.share <= 0:
        raise BudgetError(f"budget {budget!r} leaves nothing to spend: give a share above 0%")
    return parsed


def _parse_int(budget: SupportsIndex) -> Budget:
    if isinstance(budget, bool):
        raise BudgetError(f"budget {budget!r} is no size: give bytes as an int, or {_FORMS}")
    try:
        return Budget("bytes", size_bytes=operator.index(budget))
    except TypeError as error:
        raise BudgetError(
            f"budget {budget!r} is a {type(budget).__name__}: give whole bytes as an int, "
            f"or a text such as {_FORMS}"
        ) from error


def _parse_text(text: str) -> Budget:
    word = text.lower()
    if word in ("auto", "min"):
        return Budget("auto" if word == "auto" else "min")
    match = re.fullmatch(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([a-z]*|%)", word)
    if match is None:
        raise BudgetError(f"budget {text!r} cannot be read: write it like {_FORMS}")
    number, unit = match.groups()
    if unit == "%":
        return Budget("share", share=float(number) / 100)
    if not unit:
        raise BudgetError(
            f"budget {text!r} has no unit: {number} bytes? "
            f"Write {number}%, {number}MiB or {number}GiB"
        )
    if unit not in _UNITS:
        raise BudgetError(
            f"budget {text!r} has an unknown unit {unit!r}: write {number}MiB or {number}GiB "
            f"(units: B, kB, MB, GB, KiB, MiB, GiB)"
        )
    return Budget("bytes", size_bytes=int(float(number) * _UNITS[unit]))


def auto_bytes(device: str = CPU) -> int:
    """What a device of this machine has free, less the reserve."""
    return int(free_bytes(device) * (1 - RESERVE))


def unmodified(graph: TrainingGraph) -> Result:
    """The step as eager runs it: every op once, nothing dropped before its last use."""
    return solvers.solve(as_eager(graph), UNBOUNDED_BYTES, solver="store_all")


def resolve_budget(
    graph: TrainingGraph,
    budget: str | SupportsIndex,
    *,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    keep: Globs = (),
    recompute: Globs = (),
    **options: Any,
) -> int:
    """Bytes that `budget` means for `graph`.

    Per cents are of the unmodified peak, and ``min`` is the least peak that `solver` knows
    for these pins and options. ``auto`` is what the model and the batch take plus the memory
    that is free on its device less a tenth; for a modelled device, its memory less a tenth.
    """
    parsed = parse_budget(budget)
    if parsed.kind == "share":
        return int(parsed.share * unmodified(graph).peak_bytes)
    if parsed.kind == "auto" and is_in_table(graph.device):
        return int(modelled_device(graph.device).memory_bytes * (1 - RESERVE))
    if parsed.kind == "auto":
        resident = graph.resident
        allocated_bytes = resident.parameters_bytes + resident.buffers_bytes + resident.batch_bytes
        return auto_bytes(graph.device) + allocated_bytes
    if parsed.kind == "min":
        lost = solvers.solve(
            graph, 0, solver,
            time_limit_s=time_limit_s, keep=keep, recompute=recompute, **options,
        )  # fmt: skip
        return lost.least_feasible_bytes
    return parsed.size_bytes
