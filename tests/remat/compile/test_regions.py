"""Blocks that are compiled by themselves, with one options object: one budget for all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.memory_events import measure_peak
from tests.limits import AMPLE_S

pytestmark = pytest.mark.slow
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


@pytest.mark.parametrize("in_place", [True, False])
def test_the_budget_is_that_of_all_blocks(in_place: bool) -> None:
    """Before, each block was planned alone, and the third was refused."""
    model, x = Stack(), torch.randn(512, WIDTH)
    model(x).backward()
    right = [p.grad for p in model.parameters() if p.grad is not None]
    options = {"budget": "100%", "solver": "cut", "replays": 2, "time_limit_s": AMPLE_S}
    for i, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend="remat", options=options)
        else:
            model.blocks[i] = torch.compile(block, backend="remat", options=options)  # pyright: ignore
    model.zero_grad()
    with pytest.warns(
        UserWarning, match="compile Stack .* only a part of it is compiled, whose parameters"
    ):
        model(x).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for ours, eagers in zip(found, right, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    held_bytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), x))
    peak_bytes = held_bytes + measure_peak(lambda: model(x).backward())
    plan = compiled_plans()[-1]
    assert plan.held_bytes > held_bytes - x.nbytes, "parameters of all blocks count"
    assert peak_bytes <= 1.05 * plan.budget_bytes
