"""Forward that writes into a tensor which is no input of the step is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError

WIDTH = 8
TRACKER: dict[str, Tensor] = {"aux": torch.zeros(4)}
COUNTER = torch.zeros(4)


class Net(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(WIDTH, WIDTH), write
        self.register_buffer("known", torch.zeros(4))
        self.plain, self.listed = torch.zeros(4), [torch.zeros(4)]
        self.norms = [nn.BatchNorm1d(WIDTH)]
        self.average = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        self.write(self, h)
        return h.square().mean()


def averaged(model: Any, h: Tensor) -> None:
    for mine, own in zip(model.average[0].parameters(), model.linear.parameters(), strict=True):
        mine.lerp_(own.detach(), 0.1)


def tracked(model: Any, h: Tensor) -> None:
    with torch.no_grad():
        TRACKER["aux"][0] += h.mean()


WRITES: dict[str, tuple[str, Callable[[Any, Tensor], object]]] = {
    "item of a global": ("TRACKER", tracked),
    "global": ("COUNTER", lambda m, h: COUNTER.copy_(h.detach()[0, :4])),
    "attribute": ("plain", lambda m, h: m.plain.add_(h.detach().mean())),
    "by a number": ("plain", lambda m, h: m.plain.add_(1)),
    "a view": ("plain", lambda m, h: m.plain.view(2, 2).mul_(2).add_(1)),
    "an item": ("plain", lambda m, h: m.plain.__setitem__(slice(1, 3), h.detach()[0, :2])),
    "with a graph": ("plain", lambda m, h: m.plain.__setitem__(slice(0, 4), h[0, :4])),
    "of a list": ("listed", lambda m, h: m.listed[0].fill_(1)),
    "out=": ("plain", lambda m, h: torch.add(m.plain, 1, out=m.plain)),
    "several": ("plain", lambda m, h: torch._foreach_add_([m.plain], 1.0)),
    "by torch's own code": ("plain", lambda m, h: nn.init.ones_(m.plain)),
    "a module beside": (r"norms\[0\]", lambda m, h: m.norms[0](h)),
    "parameters beside": (r"average\[0\]\.weight", averaged),
    "inside of a transform": ("COUNTER", lambda m, h: torch.vmap(lambda one: one.add_(1))(COUNTER)),
    "through .data": ("neither a parameter", lambda m, h: m.plain.data.__setitem__(0, 3.0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_such_a_write_is_refused(write: str) -> None:
    name, write_it = WRITES[write]
    model, before = Net(write_it), TRACKER["aux"].clone()
    with pytest.raises(CaptureError, match=name) as said:
        remat.capture(model, (torch.randn(4, WIDTH),))
    assert "INTERNAL ASSERT" not in str(said.value)
    assert "entirely functional" not in str(said.value)
    assert "test_foreign_writes.py" in str(said.value)
    assert torch.equal(before, TRACKER["aux"])


def gradient_of_what_is_written(model: Any, h: Tensor) -> object:
    def energy(one: Tensor) -> Tensor:
        made = torch.zeros_like(one)
        made += model.linear(one).mul_(2)
        return made.square().sum()

    return torch.func.grad(energy)(h)


def rows_that_are_written(model: Any, h: Tensor) -> object:
    return torch.vmap(lambda one: model.linear(one).mul_(one))(h)


@pytest.mark.parametrize("write", [gradient_of_what_is_written, rows_that_are_written])
def test_what_a_transform_makes_is_written(write: Callable[[Any, Tensor], object]) -> None:
    assert remat.capture(Net(write), (torch.randn(4, WIDTH),)).ops


def test_buffers_arguments_and_tensors_of_forward_are_written_as_before() -> None:
    def write(model: Any, h: Tensor) -> None:
        model.known.add_(h.detach().mean())
        made = torch.zeros(3)
        made[1] = 2.0
        model.plain.requires_grad_(False)

    model = Net(write)
    fast: Any = remat.rematerialize(model, (torch.randn(4, WIDTH),), budget="1GiB")
    fast(torch.randn(4, WIDTH)).backward()
    assert model.known.any()
