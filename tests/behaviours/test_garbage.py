"""What is measured and compared is let go of at once, not when Python collects garbage.

On a device the collector knows of no shortage: tensors in a cycle would take the room of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import remat

ROWS, WIDTH = 1536, 32
LARGE_BYTES = ROWS * WIDTH * 4


def mlps() -> nn.Module:
    """Which run in chunks where that gives eager's bits, which is tried out."""
    hidden = 4 * WIDTH
    layers = [(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)) for _ in range(3)]
    return nn.Sequential(*(nn.Sequential(*layer) for layer in layers))


def mean_square(result: Tensor) -> Tensor:
    return result.square().mean()


def captured(x: Tensor) -> None:
    remat.capture(mlps(), (x,), loss_fn=mean_square, split="exact")


def rewritten(x: Tensor) -> None:
    remat.rematerialize(mlps(), (x,), loss_fn=mean_square, budget="70%")


def in_blocks(x: Tensor) -> None:
    remat.rematerialize(mlps(), (x,), blocks="*", budget="100%")


def trained(x: Tensor) -> None:
    model = remat.rematerialize(mlps(), budget="90%")
    for _ in range(2):
        model(x).sum().backward()


@contextmanager
def kept_garbage() -> Iterator[list[object]]:
    """What only the collector would free is put into this list."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def is_large(found: object) -> bool:
    """Whether it is a tensor with memory of its own, which is no parameter of a model."""
    if not isinstance(found, Tensor) or isinstance(found, FakeTensor | nn.Parameter):
        return False
    if torch._is_functional_tensor(found) or type(found) is not Tensor:
        return False
    return not found.is_meta and found.untyped_storage().nbytes() >= LARGE_BYTES


@pytest.mark.parametrize("act", [captured, rewritten, in_blocks, trained])
def test_no_tensor_waits_for_the_collector(act: Callable[[Tensor], None]) -> None:
    x = torch.randn(ROWS, WIDTH)
    with kept_garbage() as garbage:
        act(x)
        gc.collect()
        assert [tuple(one.shape) for one in garbage if is_large(one)] == []


def test_a_tensor_that_waits_is_seen() -> None:
    with kept_garbage() as garbage:
        cycle: list[object] = [torch.zeros(LARGE_BYTES)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert any(map(is_large, garbage))
