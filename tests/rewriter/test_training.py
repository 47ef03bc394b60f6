"""The rewritten module in an ordinary training loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from remat.graph_capture import capture
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from tests.models import make
from tests.steps import rewritten, schedule_of


def train(module: nn.Module, args: tuple[Any, ...], steps: int, accumulate: int) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        for _ in range(accumulate):
            loss = module(*args) / accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "name",
    ["dropout", pytest.param("attention_with_dropout", marks=pytest.mark.slow), "tied_weights"],
)
def test_three_adamw_steps_with_accumulation_are_bit_equal(name: str) -> None:
    model, module, args = rewritten(name)
    eager = copy.deepcopy(model)
    expected, found = train(eager, args, 3, 2), train(module, args, 3, 2)
    assert found == expected
    assert found[-1] != found[0]
    for (key, a), b in zip(eager.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b), key


def test_state_dict_has_the_same_keys_and_loads_both_ways() -> None:
    model, module, args = rewritten("dropout")
    train(module, args, 1, 1)
    other = make("dropout")[0]
    assert list(module.state_dict()) == list(other.state_dict())
    other.load_state_dict(module.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True)
    )
    fresh = make("dropout")[0]
    module.load_state_dict(fresh.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True)
    )


def test_is_a_graph_module_and_an_instance_of_the_models_class() -> None:
    model, module, _ = rewritten("plain")
    assert isinstance(module, torch.fx.GraphModule)
    assert isinstance(module, type(model))
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(module.parameters(), model.parameters(), strict=True))
    text = str(module)
    assert "def forward(self, args_list)" in text or "# forward" in text
    assert "# backward" in text
    assert "torch.ops.aten.linear.default" in module.code
    assert "gelu_backward" in module.print_readable(print_output=False)
    assert module.graph is module.forward_module.graph


def test_eval_and_no_grad_use_the_original_forward() -> None:
    model, module, args = rewritten("dropout")
    calls: list[str] = []
    model.body[0].register_forward_hook(lambda *_: calls.append("called"))  # pyright: ignore
    module.eval()
    assert not model.training
    assert torch.equal(module(*args), model(*args))
    module.train()
    assert model.training
    with torch.no_grad():
        module(*args)
    assert len(calls) == 3


def test_a_captured_loss_is_returned_in_training_and_the_output_in_eval() -> None:
    model, args, _, loss_fn, target = make("loss_function_with_target")
    graph = capture(model, args, loss_fn=loss_fn, target=target)
    module = rewrite(model, schedule_of(graph, "store_all"))
    assert loss_fn is not None
    assert torch.equal(module(*args, target=target), loss_fn(model(*args), target))
    module.eval()
    assert torch.equal(module(*args), model(*args))
    assert torch.equal(module(*args, target=target), loss_fn(model(*args), target))


def test_the_users_model_is_left_as_it_was() -> None:
    model, args, kwargs, loss_fn, target = make("batch_norm_in_place_relu")
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    rewrite(model, schedule_of(graph, "store_all"))
    assert torch.equal(before, torch.get_rng_state())
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_two_plans_of_one_model_live_side_by_side() -> None:
    model, args, kwargs, loss_fn, target = make("dropout")
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    first, second = (rewrite(model, schedule_of(graph, kind)) for kind in ("store_all", "cut"))
    losses = [train(copy_state(module, model), args, 1, 1) for module in (first, second)]
    assert losses[0] == losses[1]


def copy_state(module: RematModule, model: nn.Module) -> RematModule:
    model.load_state_dict(make("dropout")[0].state_dict())
    return module
