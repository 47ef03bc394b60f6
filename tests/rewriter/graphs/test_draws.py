"""What forward may draw: each is drawn again in backward, in eager's code and in Inductor's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.inductor.as_tensors import functional_form
from tests.limits import AMPLE_S

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: torch.randn(x.shape, device=x.device),
    "rand": lambda x: torch.rand(*x.shape, dtype=x.dtype, layout=torch.strided),
    "randint": lambda x: torch.randint(1, 5, x.shape, device=x.device).float(),
    "randn_like": lambda x: torch.randn_like(x, memory_format=torch.contiguous_format),
    "randperm": lambda x: (torch.randperm(x.shape[1], device=x.device) + 1) / x.shape[1],
    "normal": lambda x: torch.normal(0.0, 1.0, x.shape, device=x.device),
    "in_place": lambda x: x.new_empty(x.shape).normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.7)),
    "multinomial": lambda x: torch.multinomial(torch.ones(5), x.shape[1], replacement=True) / 2,
}


class Noisy(nn.Module):
    """Layers whose inputs are multiplied by noise, as diffusion models and VAEs draw it."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.draw(x)))
        return x.square().mean()


@pytest.mark.parametrize("name", DRAWS)
def test_each_is_drawn_again_to_eagers_bits(name: str) -> None:
    model, x = Noisy(DRAWS[name]), torch.randn(512, 32)
    graph = remat.capture(model, (x,))
    schedule = remat.solve(graph, "1GiB", solver="chen_sqrt").schedule
    assert schedule is not None
    module = agreed_rewrite(model, schedule)
    assert "run_with_rng_state" in module.code
    found = remat.check(model, module, (x,), steps=1)
    assert found.differences == ()
    assert found.gradients == found.gradients_total > 0


def test_a_function_of_the_state_takes_the_names_that_its_op_takes() -> None:
    state, device = torch.get_rng_state(), torch.device("cpu")
    form = functional_form(torch.ops.aten.randint.low)
    drawn, after = form(state, "cpu", 1, 9, [4], device=device, dtype=torch.int64)
    assert torch.equal(torch.get_rng_state(), state), "the stream is left as it was"
    assert torch.equal(drawn, torch.randint(1, 9, [4]))
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_inductors_code_draws_what_eager_draws(name: str) -> None:
    model, x = Noisy(DRAWS[name]), torch.randn(512, 32)
    module = remat.rematerialize(
        model, (x,), budget="150%", recompute=["*"],
        compile=True, check=False, solver="cut", time_limit_s=AMPLE_S,
    )  # fmt: skip
    assert "run_with_rng_state" in module.code
    found = remat.check(model, module, (x,), steps=1)
    assert found.equal
    assert found.rng_equal
    assert found.largest_error < 1e-5
