"""What a budget may look like, and how many bytes it means."""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, SupportsIndex

from remat.graph_capture.device_table import CPU, is_cuda
from remat.graph_capture.errors import BudgetError

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


def free_bytes(device: str = CPU) -> int:
    """Memory of a device of this machine that new work may take, in bytes.

    On a CPU without swapping; on a CUDA device with what torch's allocator holds unused.
    """
    if is_cuda(device):
        return _free_on_cuda(device)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    return _free_from_sysconf()


def _free_on_cuda(device: str) -> int:
    import torch

    if not torch.cuda.is_available():
        raise BudgetError(f"budget 'auto': {device} is not here to say what is free; give a size")
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused_bytes


def _free_from_sysconf() -> int:
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if pages in os.sysconf_names:
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    raise BudgetError("budget 'auto': this system does not say what memory is free; give a size")
