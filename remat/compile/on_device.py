"""The device of a compiled graph, and what its libraries keep beside the step."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from remat.graph_capture.devices.device_table import CPU, is_cuda
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.devices.placement import device_holding
from remat.graph_capture.errors import DeviceError
from remat.rewriter.inductor.prices import for_real


def device_of(inputs: Iterable[Any]) -> str:
    """``cpu``, or the one CUDA device that holds inputs of a graph, such as ``cuda:0``.

    Raises
    ------
    DeviceError : the inputs are on several CUDA devices, or on a device of another kind.
    """
    tensors = [given for given in inputs if isinstance(given, Tensor)]
    device = device_holding(tensors)
    others = sorted({str(tensor.device) for tensor in tensors} - {CPU, device})
    if others:
        on_cuda = [device] if is_cuda(device) else []
        raise DeviceError(
            'backend "remat" plans a graph for a CPU or for one CUDA device, and this one has '
            f"inputs on {', '.join((*on_cuda, *others))}: compile what runs on each device by "
            "itself, or compile without a budget"
        )
    return device


@functools.cache
def libraries_bytes(device: str) -> int:
    """Bytes that libraries such as cuBLAS keep on a device from their first call on."""
    meter = meter_of(device)
    with for_real(meter):
        return meter.library_bytes()
