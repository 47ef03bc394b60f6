"""Masks that forward leaves for backward are bytes; those that users see are what they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from remat.compile.graph_context import compiled_plans
from remat.rewriter.inductor.fused_nodes import (
    LEAST_MASK_ELEMENTS,
    keep_masks_as_bytes,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Gate(nn.Module):
    """Layers with dropout, and the mask of what is positive as a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)
        layers = [(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5)) for _ in range(4)]
        self.body = nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(self.body(x))
        positive = y > 0
        return self.drop(torch.where(positive, y, y * 0.1)), positive


def saved_by(module: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """What a step saves, and its results."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, positive = module(x)
    y.square().sum().backward()
    return saved, y, positive


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["90%", "200%"])
def test_masks_are_saved_as_bytes_and_seen_as_bool(budget: str) -> None:
    model, x = Gate(), torch.randn(1024, 64)
    stock = torch.compile(model)
    _, expected, expected_mask = saved_by(stock, x)
    gradient = model.linear.weight.grad
    assert gradient is not None
    model.zero_grad()
    ours = torch.compile(
        model, backend="remat", options={"budget": budget, "replays": 4, "solver": "cut"}
    )
    saved, y, mask = saved_by(ours, x)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(model.linear.weight.grad, gradient)
    kinds = {tensor.dtype for tensor in saved if tensor.shape == x.shape}
    assert torch.uint8 in kinds
    assert torch.bool not in kinds
    plan = compiled_plans()[-1]
    assert plan.schedule is not None
    if budget == "200%":
        assert plan.recomputed == 0


def joint(elements: int) -> tuple[fx.GraphModule, fx.Node]:
    """x > 0 read by forward's only result and by the only gradient, and that mask."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    mask = graph.call_function(aten.gt.Scalar, (x, 0))
    result = graph.call_function(aten.where.self, (mask, x, x))
    gradient = graph.call_function(aten.where.self, (mask, tangent, tangent))
    graph.output((result, gradient))
    for node in (x, tangent, result, gradient):
        node.meta["val"] = torch.randn(elements)
    mask.meta["val"] = x.meta["val"] > 0
    return fx.GraphModule(nn.Module(), graph), mask


def test_each_reader_compares_the_byte_by_itself() -> None:
    gm, mask = joint(LEAST_MASK_ELEMENTS)
    assert keep_masks_as_bytes(gm, 1) == 1
    (number,) = mask.users
    (byte,) = number.users
    assert byte.meta["val"].dtype == torch.uint8
    assert [reader.meta["val"].dtype for reader in byte.users] == [torch.float32] * 2
    compared = [user for reader in byte.users for user in reader.users]
    assert [user.target for user in compared] == [aten.ne.Scalar] * 2
    assert all(len(user.users) == 1 for user in compared)
    x, tangent = torch.randn(9), torch.randn(9)
    result, gradient = gm(x, tangent)
    assert torch.equal(result, x)
    assert torch.equal(gradient, tangent)


def test_small_masks_and_masks_of_forward_alone_stay() -> None:
    gm, mask = joint(LEAST_MASK_ELEMENTS - 1)
    assert keep_masks_as_bytes(gm, 1) == 0
    assert len(mask.users) == 2
    gm, mask = joint(LEAST_MASK_ELEMENTS)
    keep_masks_as_bytes(gm, 2)
    assert len(mask.users) == 2
