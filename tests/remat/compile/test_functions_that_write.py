"""An `autograd.Function` that writes to what it returns has eager's gradients, or is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from remat.graph_capture.torch_private.core import loses_gradients


def in_place(ctx: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(3)
    return y


def copied(ctx: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(x * 3)
    return y


def out(ctx: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.mul(x, 3, out=y)
    return y


def added(ctx: Any, x: Tensor) -> Tensor:
    y = x * 2
    y += x
    return y


def of_two(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    y.mul_(3)
    return x * 3, y


def beside(ctx: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(3)
    return y * 1


def by_index(ctx: Any, x: Tensor) -> Tensor:
    y = x * 3
    y[0] = 0
    return y


def plain(ctx: Any, x: Tensor) -> Tensor:
    return x * 3


LOST = (in_place, copied, out, added, of_two)
KEPT = (beside, by_index, plain)


def sevenfold(ctx: Any, *grads: Tensor) -> Tensor:
    """Nothing that autograd would find by itself."""
    return 7 * sum(grads[1:], grads[0])


def step(forward: Callable[..., Any], *, is_checkpointed: bool = False) -> nn.Module:
    functions = {"forward": staticmethod(forward), "backward": staticmethod(sevenfold)}
    function: Any = type("Written", (torch.autograd.Function,), functions)

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            read = (x * self.weight).sin()
            again = functools.partial(checkpointed, function.apply, use_reentrant=False)
            found = again(read) if is_checkpointed else function.apply(read)
            last = found[-1] if isinstance(found, tuple) else found
            return (x + last).square().mean()

    return Calls()


def gradients(forward: Callable[..., Any], **how: bool) -> tuple[Tensor, Tensor]:
    """Of eager, and of the compiled step."""
    torch._dynamo.reset()
    found: list[Tensor] = []
    for is_compiled in (False, True):
        model = step(forward, **how)
        run: Any = model
        if is_compiled:
            run = torch.compile(model, backend="remat", options={"budget": "100%"})
        run(torch.ones(2, 4)).backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad)
    return found[0], found[1]


@pytest.mark.parametrize("forward", KEPT)
def test_gradients_are_eagers(forward: Callable[..., Any]) -> None:
    eager, compiled = gradients(forward)
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("forward", LOST)
def test_gradients_that_torch_loses_are_refused(
    forward: Callable[..., Any], is_checkpointed: bool
) -> None:
    if not loses_gradients():
        eager, compiled = gradients(forward, is_checkpointed=is_checkpointed)
        torch.testing.assert_close(compiled, eager)
        return
    said = r"use torch 2\.12.*test_functions_that_write.*writes in place to what it returns"
    with pytest.raises(Exception, match=said):
        gradients(forward, is_checkpointed=is_checkpointed)
