"""Devices of this machine: which meter measures each.

This file stands above the meters, and imports each only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.graph_capture.devices.known_devices import is_cuda

if TYPE_CHECKING:
    from remat.graph_capture.devices.meter import Meter


def meter_of(device: str) -> Meter:
    if is_cuda(device):
        from remat.graph_capture.devices.cuda import CudaMeter

        return CudaMeter(device)
    from remat.graph_capture.devices.cpu import CpuMeter

    return CpuMeter()
