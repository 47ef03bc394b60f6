"""A step is captured on one device, which all of its tensors are on.

Any other is refused as soon as forward makes it: autograd must never see a fake CUDA tensor where
torch has no CUDA device, as that ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from remat.graph_capture.devices.known_devices import CPU, CUDA, check_device, is_cuda
from remat.graph_capture.errors import CaptureError, DeviceError, option
from remat.graph_capture.torch_private.core import FakeTensorMode, pytree

if TYPE_CHECKING:
    from remat.graph_capture.devices.meter import Meter


_HOST = (CPU, "meta")  # for any device but CUDA; those on ``meta`` are traced as if on the CPU


def resolved_device(name: str | None, model: nn.Module) -> str:
    """`name`, with its index if it is ``cuda``; None: where the model is. DeviceError: not here."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CaptureError(
            "pass the model, and its batch as args=(...): a step is captured from a "
            f"torch.nn.Module, and this is {type(model).__name__}"
        )
    own = next((str(p.device) for p in model.parameters() if p.is_cuda), CPU)
    if name is None:
        name = own if torch.cuda.is_available() else CPU
    check_device(name)
    if name != CUDA:
        return name
    return own if is_cuda(own) else f"{CUDA}:{torch.cuda.current_device()}"


def device_holding(tensors: Iterable[Any]) -> str:
    """The first CUDA device that holds one of these, else the CPU."""
    devices = (str(one.device) for one in tensors if isinstance(one, Tensor))
    return next(filter(is_cuda, devices), CPU)


def check_placement(what: str, found: torch.device, device: str) -> None:
    if found.type not in _HOST and not torch.get_device_module(found).is_available():
        raise DeviceError(
            "move the model and the batch to cpu, and plan for a model of the device, such as "
            f"{option('device', 'h100')}: {what} is on {found}, which this torch cannot run"
        )
    if is_cuda(device) and str(found) != device:
        raise DeviceError(
            f"move the whole model and its batch there, with .to({device!r}): {what} is on "
            f"{found}, and the step is captured on {device}"
        )
    if not is_cuda(device) and found.type not in _HOST:
        raise DeviceError(
            f"capture with {option('device', str(found))}, or move the model and the batch to "
            f"cpu: {what} is on {found}, and a step for {device} is captured on cpu"
        )


def refuse_other_devices(mode: FakeTensorMode, device: str) -> None:
    """Let `mode` raise `DeviceError` as soon as an op gives a tensor of another device."""
    dispatch = mode.dispatch
    allowed = {*_HOST, torch.device(device).type} if is_cuda(device) else set(_HOST)

    # As soon as it is made: a fake CUDA tensor ends the process in autograd.
    def watched(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = dispatch(func, types, args, kwargs or {})
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.device.type not in allowed:
                raise DeviceError(
                    f"make it on the device of the input, with device=x.device: {func} makes a "
                    f"tensor on {leaf.device} in a step captured on "
                    f"{(device if is_cuda(device) else CPU)}"
                )
        return found

    mode.dispatch = watched


def meter_of(device: str) -> Meter:
    if is_cuda(device):
        from remat.graph_capture.devices.cuda import CudaMeter

        return CudaMeter(device)
    from remat.graph_capture.devices.meter import CpuMeter

    return CpuMeter()
