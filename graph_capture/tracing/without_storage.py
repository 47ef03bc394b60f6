"""Models on the meta device: traced as if their tensors were on the CPU, without storage.

Tracing on ``meta`` itself would take the math form of attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from remat.graph_capture.over_ranks.dtensors import is_distributed


@contextlib.contextmanager
def as_if_on_cpu(model: nn.Module, mode: FakeTensorMode) -> Generator[None]:
    """Replace the model's meta parameters and buffers by fake CPU tensors meanwhile.

    Tied ones stay tied. Nothing is allocated, and everything is put back.
    """
    made: dict[int, Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    kept.append((held, name, tensor))
    try:
        for held, name, tensor in kept:
            if id(tensor) not in made:
                made[id(tensor)] = _fake(tensor, mode)
            held[name] = made[id(tensor)]
        yield
    finally:
        for held, name, tensor in kept:
            held[name] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if is_distributed(tensor):
        return _fake_dtensor(tensor, mode)
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _fake_dtensor(tensor: Any, mode: FakeTensorMode) -> Tensor:
    """The same placements over a fake local part."""
    fake = type(tensor).from_local(
        _fake(tensor.to_local().detach(), mode), tensor.device_mesh, tensor.placements,
        run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return nn.Parameter(fake, requires_grad=tensor.requires_grad)


def has_storage(model: nn.Module) -> bool:
    """Whether no parameter and no buffer of the model is on the meta device."""
    return not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
