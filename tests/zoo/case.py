"""What a model of the zoo is: how it is built, and what it is expected to be."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")


@dataclass(frozen=True)
class Case:
    """A model of random weights and a small batch.

    Attributes
    ----------
    model, args, kwargs, loss_fn, target : as `remat.capture` takes them.
    autocast : dtype under which the step runs, if any.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loss_fn: Callable[..., Any] | None = None
    target: Any = None
    autocast: torch.dtype | None = None

    def of(self, model: nn.Module) -> Case:
        """The same batch and loss for another model."""
        return dataclasses.replace(self, model=model)

    def under_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast that the step runs in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", self.autocast)


@dataclass(frozen=True)
class Entry:
    """A row of the zoo.

    Attributes
    ----------
    build : makes the case. needs : package that it is built from; empty for torch alone.
    refused : a part of the message with which the model is refused; empty if it is not.
    """

    build: Callable[[], Case]
    needs: str = ""
    refused: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether the package that it needs is not installed."""
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None

    def make(self, seed: int = 0) -> Case:
        """The case, the same at every call; the random stream is left alone.

        Another seed makes another batch, and another model.
        """
        if self.needs:
            name_ops_of_torchvision()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()


def name_ops_of_torchvision() -> None:
    """Let a torchvision be imported whose own library torch cannot load.

    PyPI's is built for CUDA, and a torch for the CPU alone cannot load it; no model here
    runs its ops.
    """
    if torch.version.cuda:
        return
    boxes = "Tensor dets, Tensor scores, float iou_threshold"
    rois = "Tensor input, Tensor rois, float spatial_scale, SymInt h, SymInt w, int n, bool aligned"
    for name, given in (("nms", boxes), ("qnms", boxes), ("roi_align", rois)):
        if not hasattr(torch.ops.torchvision, name):
            TORCHVISION.define(f"{name}({given}) -> Tensor")


def loss_of(output: Any) -> Tensor:
    """The loss that a Hugging Face model computes where it is given labels."""
    return output.loss


def classes(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over the last dimension but the batch's."""
    return nn.functional.cross_entropy(logits, target)


def labelled(model: nn.Module, size: int = 64, batch: int = 4, n_classes: int = 10) -> Case:
    """An image classifier with a batch of random images and labels."""
    images = torch.randn(batch, 3, size, size)
    return Case(model, (images,), loss_fn=classes, target=torch.randint(n_classes, (batch,)))
