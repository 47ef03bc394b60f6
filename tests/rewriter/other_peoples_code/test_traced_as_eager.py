"""What is traced as eager runs it: known values, views, repeated results, own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.plans.loading import plan_of
from tests.rewriter.other_peoples_code.small_models import WIDTH, Base, batch, gradients, planned


def test_dropout_at_rest_is_its_input() -> None:
    class InPlace(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            y = nn.functional.dropout(h, 0.1, training=False)
            y += 1
            return torch.tanh(h)

    model, x = InPlace(), batch()
    assert torch.equal(planned(model, x)(x), model(x))


def test_an_expanded_batch_is_planned() -> None:
    class Adding(Base):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return self.linear(x) + bias

    model, x, bias = Adding(), batch(), torch.randn(1, WIDTH).expand(8, WIDTH)
    assert torch.equal(planned(model, x, bias)(x, bias), model(x, bias))


def test_a_tensor_that_is_returned_twice_is_one_tensor_and_predicted() -> None:
    class States(Base):
        def forward(self, x: Tensor) -> Any:
            states = [x]
            for _ in range(3):
                states.append(torch.tanh(self.linear(states[-1])))
            self.last = states[-1]
            return states[-1], {"all": tuple(states), "again": states[-1], "number": 3}

    model, x = States(), torch.randn(512, WIDTH)
    graph = remat.capture(model, (x,))
    result = remat.solve(graph, "100%")
    assert result.schedule is not None
    fast = agreed_rewrite(model, result.schedule)
    found = remat.check(model, fast, (x,), steps=1)
    assert found.equal
    assert found.plan_peak_bytes == result.peak_bytes
    last, rest = fast(x)
    assert last is rest["again"] is rest["all"][-1] is model.last
    assert rest["number"] == 3


def test_a_loss_that_makes_its_gradient_in_forward_keeps_eagers_peak() -> None:
    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            total, gradient = x.new_zeros(()), torch.zeros_like(weight)
            for part in x.chunk(8):
                z = (part @ weight).tanh()
                total = total + z.sum()
                gradient = gradient + part.T @ (1 - z * z)
            ctx.save_for_backward(gradient)
            return total

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> tuple[None, Tensor]:
            return None, given * ctx.saved_tensors[0]

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 512) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return Chunked.apply(x, self.weight)

    torch.manual_seed(0)
    model, x = Summed(), torch.randn(1024, WIDTH)
    fast = planned(model, x)
    found = remat.check(model, fast, (x,), steps=1)
    assert found.equal
    assert found.plan_peak_bytes <= 1.02 * found.baseline_peak_bytes
    again = [op.name for op in plan_of(fast).graph.ops if op.phase == "backward"]
    assert not any("tanh" in name for name in again)


def test_code_that_looks_at_values_made_of_numbers_alone_takes_the_way_of_eager() -> None:
    class Positions(Base):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[0])[None]
            steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
            kept = torch.ones(3, dtype=torch.bool)
            kept[1] = False
            scale = 2.0 if (steps == 1).all() and not kept[1] else 100.0
            return self.linear(x).sum() * scale * torch.tensor([1, 3]).tolist()[1]

    model, x = Positions(), batch()
    fast = planned(model, x)
    pairs = zip(gradients(model, lambda: model(x)), gradients(model, lambda: fast(x)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_known_tensor_that_is_given_values_of_the_batch_is_known_no_more() -> None:
    class Written(Base):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(2)
            first = total[:1]
            total[0] = x.sum()
            return self.linear(x).sum() * (2.0 if first.item() > 0 else 1.0)

    with pytest.raises(CaptureError, match=r"(?s)leave args\[0\] out.*the values of args\[0\]"):
        planned(Written(), batch())
