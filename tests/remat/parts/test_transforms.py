"""Models in parts whose modules are called inside of `torch.func`'s transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import remat
from tests.beside_eager import same_bits
from tests.remat.parts.models import WIDTH, Branching, rows

FORWARDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda head, h: vmap(head)(h),
    "grad": lambda head, h: grad(lambda one: head(one).square().sum())(h),
    "jvp": lambda head, h: jvp(head, (h,), (h.cos(),))[1],
    "gradients of parameters": lambda head, h: h * grad(
        lambda own: functional_call(head, own, (h.detach(),)).square().mean()
    )(dict(head.named_parameters()))["0.bias"],
}  # fmt: skip


class Transformed(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.do = Branching(), forward
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        return self.do(self.head, h).square().mean() + self.head(h).mean()


@pytest.mark.parametrize("forward", FORWARDS)
def test_such_modules_run_once(forward: str) -> None:
    model = Transformed(FORWARDS[forward])
    module = remat.rematerialize(model, (rows(),), budget="min", verbose=False)
    assert module.modules_again == ("block.body",)
    assert same_bits(model, module, (rows(),))
