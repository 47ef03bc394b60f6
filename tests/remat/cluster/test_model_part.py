"""A model's forward, left at its first block and reached again behind its last one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from remat.cluster.model_part import (
    Arrival,
    Before,
    Behind,
    Beside,
    Numbers,
    arrival_of,
    beside_blocks,
)
from remat.graph_capture.errors import CaptureError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, rope: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * rope * self.up(x)


class Model(nn.Module):
    """Adds positions of its own, and gives a table to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.rope = nn.Module()
        self.rope.register_buffer("table", torch.randn(16, 1))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tok(ids) + self.pos(positions)
        rope: Tensor = self.rope.table[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, rope, scale=0.5)
        return self.head(x).float() * 2


def test_both_ends_make_what_the_whole_model_makes() -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(16, (2, 6))
    blocks = list(model.layers)
    before = Before(model, blocks[0])
    given = arrival_of(before, (ids,))
    assert given.kwargs == {"scale": 0.5}
    x = given.border
    for block in blocks:
        x = block(x, *given.args_, **given.kwargs)
    behind = Behind(model, blocks, [model.head], (ids,))
    for _ in range(2):
        assert torch.equal(behind(x), model(ids))


class Packed(Model):
    """As transformers' do, looks at its batch where it is not compiled; each block gets a rate."""

    def forward(self, ids: Tensor) -> Tensor:
        is_plain = torch.compiler.is_compiling() or bool((ids >= 0).all())
        rope: Tensor = self.rope.table[: ids.shape[1]]
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x, rope, scale=0.5 if is_plain else 0.0)
        return self.head(x)


def test_what_looks_at_values_leaves_that_out_where_there_are_none() -> None:
    torch.manual_seed(0)
    model, ids = Packed(), torch.randint(16, (2, 6))
    blocks = list(model.layers)
    given = arrival_of(Before(model, blocks[0]), (ids,))
    numbers = Numbers(model, blocks[0], (ids,), looks_at_data=True)()
    assert numbers.kwargs == given.kwargs == {"scale": 0.5}
    x = given.border
    for block in blocks:
        x = block(x, *given.args_, **given.kwargs)
    behind = Behind(model, blocks, [model.head], (ids,), looks_at_data=True)
    assert torch.equal(behind(x), model(ids))
    assert not torch.compiler.is_compiling()


def test_a_mask_that_is_there_without_values_alone_is_left_out() -> None:
    """Later stages make numbers anew; what was no tensor when blocks were planned stays none."""
    border = torch.zeros(1)
    planned = Arrival(border, (None, 0.5), {})
    made = Arrival(border, (torch.ones(2, device="meta"), 0.25), {})
    beside = Beside(planned, planned, cast("Any", lambda: made))
    assert beside.now(None) == ((None, 0.25), {})


def test_the_end_shares_its_own_modules_and_holds_no_others() -> None:
    model, ids = Model(), torch.zeros(1, 4, dtype=torch.int64)
    behind = Behind(model, list(model.layers), [model.head], (ids,))
    shell = behind._shell
    assert shell.head is model.head
    assert shell.tok.weight.is_meta
    assert model.tok.weight.device.type == "cpu"


def test_a_forward_that_runs_no_block_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="does not reach its first block"):
        Before(model, nn.Linear(2, 2))(torch.zeros(1, 4))


def test_what_lies_beside_the_blocks() -> None:
    model = Model()
    found = beside_blocks(model, [f"layers.{i}" for i in range(3)])
    assert list(found) == ["tok", "pos", "rope", "head"]
