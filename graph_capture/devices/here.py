"""Devices of this machine: which meter measures each, and how much memory is free.

This file stands above the meters, and imports each only when it is asked for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from remat.graph_capture.devices.device_table import CPU, is_cuda
from remat.graph_capture.errors import BudgetError

if TYPE_CHECKING:
    from remat.graph_capture.devices.meter import Meter


def free_bytes(device: str = CPU) -> int:
    """Bytes that new work may take on a device of this machine.

    On a CPU, without swapping. On a CUDA device, what torch's allocator holds unused counts as
    free.
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


def meter_of(device: str) -> Meter:
    """The meter of a device of this machine."""
    if is_cuda(device):
        from remat.graph_capture.devices.cuda_meter import CudaMeter

        return CudaMeter(device)
    from remat.graph_capture.devices.cpu_meter import CpuMeter

    return CpuMeter()
