"""The device of a compiled graph, and what its libraries keep beside the step."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from remat.graph_capture.devices.device_table import CPU, is_cuda
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.errors import DeviceError
from remat.rewriter.inductor.prices import for_real


def device_of(inputs: Iterable[Any]) -> str:
    """``cpu``, or the one CUDA device that holds inputs of a graph, such as ``cuda:0``.

    Raises
    ------
    DeviceError : the inputs are on several CUDA devices, or on a device of another kind.
    """
    found = {str(t.device) for t in inputs if isinstance(t, Tensor)}
    on_cuda = sorted(filter(is_cuda, found))
    others = sorted(found - {CPU, *on_cuda})
    if others or len(on_cuda) > 1:
        raise DeviceError(
            f'backend "remat" plans a graph for a CPU or for one CUDA device, and this one has '
            f"inputs on {', '.join((*others, *on_cuda))}: compile what runs on each device by "
            "itself, or compile without a budget"
        )
    return on_cuda[0] if on_cuda else CPU


@functools.cache
def libraries_bytes(device: str) -> int:
    """Bytes that libraries such as cuBLAS keep on a device from their first call on."""
    meter = meter_of(device)
    with for_real(meter):
        return meter.library_bytes()
