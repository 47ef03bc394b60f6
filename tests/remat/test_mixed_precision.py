"""Plans for what FSDP2's mixed precision policy casts to, on one rank, before it is sharded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, SignatureError, StateChangedError
from tests.block_models import WIDTH, Stack, rows

MIXED = remat.Sharding("fsdp2", 4, param_dtype="bfloat16", reduce_dtype="float32")


class WithTable(Stack):
    """Passes its blocks a buffer, which keeps its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.table)[0]
        return x.square().mean()


def planned(model: nn.Module, x: Tensor) -> nn.Module:
    return remat.rematerialize(model, (x,), blocks="layers.*", budget="80%", sharding=MIXED)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(0)
    model(x).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_the_parameters_come_back_as_they_were() -> None:
    model, x = Stack(), rows()
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    made = planned(model, x)
    for name, parameter in made.named_parameters():
        assert parameter is before[name][0]
        assert (parameter.data_ptr(), parameter.dtype) == (before[name][1], torch.float32)


def test_cast_parameters_train_to_eagers_bits() -> None:
    model, x = Stack(), rows()
    eager = copy.deepcopy(model).to(torch.bfloat16)
    made = planned(model, x)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    pairs = zip(gradients(eager, x.bfloat16()), gradients(made, x.bfloat16()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


def test_it_does_not_run_uncast() -> None:
    model, x = Stack(), rows()
    made = planned(model, x)
    with pytest.raises((SignatureError, StateChangedError), match=r"bfloat16.* float32"):
        made(x)


def test_what_would_not_be_cast_from_float32_is_refused() -> None:
    model = Stack().to(torch.bfloat16)
    text = r"call model.float\(\) first.*parameter scale is bfloat16, and a plan with"
    with pytest.raises(CaptureError, match=text):
        planned(model, rows())
    assert model.scale.dtype == torch.bfloat16


def test_what_would_be_cast_at_a_block_is_refused() -> None:
    text = r"block layers\.0 takes args\[1\] in float32, which fully_shard would cast to bfloat16"
    with pytest.raises(CaptureError, match=text):
        planned(WithTable(), rows())
