"""What forward saves, copied to the host until backward asks: `torch.autograd.graph.save_on_cpu`.

A CPU is its own host: torch's hooks copy nothing there, or copy within what the profiler counts.
So on a CPU the same hooks copy to memory that no allocator of torch counts, as files stand for the
host in ours. Either way all that is saved is copied, parameters too, as torch's hooks do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from benchmarks.comparison.methods import Variant
from benchmarks.comparison.models import Trainee

Hooks = Callable[[], AbstractContextManager[Any]]


def hooks_for(device: str) -> Hooks:
    """The hooks, torch's own on a GPU."""
    if device.startswith("cuda"):
        return lambda: save_on_cpu(pin_memory=True)
    return lambda: saved_tensors_hooks(_outside, Tensor.clone)


def _outside(tensor: Tensor) -> Tensor:
    """A copy in memory of numpy's, with the tensor's strides where those leave no holes."""
    like = torch.empty_like(tensor, device="meta")
    size_bytes = max(like.untyped_storage().nbytes(), tensor.element_size())
    memory = torch.from_numpy(np.empty(size_bytes, np.uint8))
    return memory.view(tensor.dtype).as_strided(like.shape, like.stride()).copy_(tensor.detach())


def save_all(trainee: Trainee, device: str) -> Variant:
    """The hooks around forward and its loss."""
    hooks = hooks_for(device)

    def call(*args: Any) -> Any:
        with hooks():
            return trainee.model(*args)

    return Variant(call)


def save_blocks(trainee: Trainee, every: int, device: str) -> Variant:
    """The hooks around every n-th block, as `offload_wrapper` puts them."""
    blocks = [trainee.model.get_submodule(path) for path in trainee.blocks[::every]]
    hooks = hooks_for(device)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        for block in blocks:
            block.forward = _within(hooks, block)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    return Variant(trainee.model, context)


def _within(hooks: Hooks, block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        with hooks():
            return forward(*args, **kwargs)

    return call
