"""All that a training step changes, put back so that each run starts from the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.devices.meter import Run
from remat.rewriter.checking.outcomes import Outcome
from remat.rewriter.graphs.rng import save_rng_state, set_rng_state

STREAM = "random stream"
Measure = TypeVar("Measure")


class StepState:
    """Gradients, buffers, the batch and the random streams as they were.

    Parameters
    ----------
    device : where the step runs. Its random stream is kept beside the CPU's.
    """

    def __init__(self, model: nn.Module, batch: Any, device: str) -> None:
        self.model = model
        self.batch = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        self.buffers = dict(model.named_buffers())
        self.leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.leaves |= {
            f"input {i}": t for i, t in enumerate(self.batch) if t.is_leaf and t.requires_grad
        }
        tensors = [*self.buffers.values(), *self.batch]
        self.before = [(t, t.detach().clone()) for t in tensors]
        self.gradients = {name: leaf.grad for name, leaf in self.leaves.items()}
        self.streams = {name: save_rng_state(name) for name in dict.fromkeys((CPU, device))}

    @contextlib.contextmanager
    def put_back(self) -> Generator[None]:
        """Leave everything as it was, gradients too."""
        try:
            yield
        finally:
            self.reset()
            for name, leaf in self.leaves.items():
                leaf.grad = self.gradients[name]

    def reset(self) -> None:
        """Back to the start of a step, without gradients."""
        with torch.no_grad():
            for tensor, value in self.before:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for device, state in self.streams.items():
            set_rng_state(state, device)
        for leaf in self.leaves.values():
            leaf.grad = None

    def prepared(self, run: Callable[[], Measure], accumulate: bool) -> Measure:
        """What `run` returns from the start of a step; with zeros as gradients if `accumulate`."""
        self.reset()
        if accumulate:
            for leaf in self.leaves.values():
                leaf.grad = torch.zeros_like(leaf)
        return run()

    def outcome(self, run: Run) -> Outcome:
        """Every output, gradient and buffer after one step, by name, and the random streams."""
        self.reset()
        found: Outcome = {}
        for path, leaf in pytree.tree_flatten_with_path(run())[0]:
            found[f"output{pytree.keystr(path)}"] = _kept(leaf)
        for name, leaf in self.leaves.items():
            found[f"gradient of {name}"] = _kept(leaf.grad, copy=False)
        for name, buffer in self.buffers.items():
            found[f"buffer {name}"] = _kept(buffer)
        for device in self.streams:
            name = STREAM if device == CPU else f"{STREAM} of {device}"
            found[name] = save_rng_state(device)
        return found


def _kept(leaf: Any, *, copy: bool = True) -> Any:
    """The leaf on the host, so that outcomes take no room on a device."""
    return leaf.detach().to(CPU, copy=copy) if isinstance(leaf, Tensor) else leaf
