"""Frames that dynamo gives up are refused where they would train without a plan, and only there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from remat.compile import given_up
from remat.compile.graph_context import compiled_plans
from remat.graph_capture.errors import CaptureError
from tests.limits import AMPLE_S

OPTIONS = {"budget": "100%", "replays": 1, "solver": "cut", "time_limit_s": AMPLE_S, "calls": 3}


class Logged(nn.Module):
    """Layers of torch's in a loop that dynamo cannot follow."""

    def __init__(self, layers: Callable[[], nn.Module], n: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers() for _ in range(n))
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.means.append(x.mean().item())
        return x.square().mean()


class LoggedLater(Logged):
    """What follows a graph break, and calls the loop of its base class."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return super().forward(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0]).square().mean()


class Block(nn.Module):
    """A module of the user's, which dynamo tries by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(model, backend="remat", options=OPTIONS)


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)


X = torch.ones(2, 3, 8)
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "layers in a loop": lambda: Logged(linear),
    "torch's own block": lambda: Logged(encoder),
    "after a graph break": lambda: LoggedLater(linear),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_would_train_eagerly_are_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)budget cannot be kept.*without a plan") as caught:
        compiled(REFUSED[name]())(X)
    assert "test_given_up.py" in str(caught.value)
    assert "graph_break" not in str(caught.value).partition("It would run")[2]


def test_a_refusal_names_the_line_and_the_layers() -> None:
    with pytest.raises(CaptureError) as caught:
        compiled(Logged(linear, 5))(X)
    text = str(caught.value)
    assert "Logged.forward" in text
    assert "item()" in text
    assert "self.layers.0, self.layers.1, self.layers.2 and 2 more" in text


def test_parameters_of_a_function_are_refused() -> None:
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

    def step(weights: list[Tensor], x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
            print(x.mean().item())
        return x.mean()

    with pytest.raises(CaptureError, match=r"train weights\[0\], weights\[1\]"):
        compiled(step)(weights, X)


def test_one_compilation_above_the_limit_is_refused() -> None:
    run = torch.compile(Block(), backend="remat", dynamic=False, options=OPTIONS)
    with dynamo_config.patch(recompile_limit=2):
        for batch in (2, 3):
            run(torch.ones(batch, 8)).sum().backward()
        with pytest.raises(CaptureError, match="recompile_limit"):
            run(torch.ones(4, 8))


def test_blocks_of_the_users_are_planned_each() -> None:
    model = Logged(Block)
    compiled(model)(X).backward()
    assert len(compiled_plans()) >= 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_step_around_a_planned_module_runs() -> None:
    def step(model: nn.Module, batches: list[Tensor]) -> float:
        total = 0.0
        for x in batches:
            loss = model(x).mean()
            loss.backward()
            total += loss.item()
        return total

    compiled(step)(Block(), [X, X])
    assert len(compiled_plans()) == 1


def test_nothing_is_refused_without_gradients() -> None:
    model = Logged(linear)
    with torch.no_grad():
        expected = model(X)
        assert torch.equal(compiled(model)(X), expected)
    frozen = Logged(linear).requires_grad_(requires_grad=False)
    assert torch.equal(compiled(frozen)(X), frozen(X))


def test_other_backends_are_left_alone() -> None:
    model = Logged(linear)
    torch.compile(model, backend="eager")(X).backward()
    assert model.means


def test_activations_of_a_frame_are_warned_about_once() -> None:
    given_up._warned.clear()

    def logged(rows: Tensor) -> Tensor:
        for row in rows:
            print(row.mean().item())
        return rows.square().mean()

    def step(x: Tensor) -> Tensor:
        x = block(x)
        torch._dynamo.graph_break()
        return logged(x)

    block = Block()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(step)(X).backward()
            torch._dynamo.reset()
    (text,) = [str(one.message) for one in said if "dynamo runs" in str(one.message)]
    assert "logged" in text


def test_a_gru_in_the_graph_is_planned_and_an_lstm_refused() -> None:
    with dynamo_config.patch(allow_rnn=True):
        compiled(Recurrent(nn.GRU))(X).backward()
        assert len(compiled_plans()) == 1
        with pytest.raises(BackendCompilerFailed, match=r"cannot run an nn\.LSTM"):
            compiled(Recurrent(nn.LSTM))(X)


class Parted(nn.Module):
    """Two graphs, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.eager = torch.compiler.disable(between)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.eager(torch.tanh(self.first(x)))).square().mean()


def warnings_of_eager_ops(between: Callable[[Tensor], Tensor]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = compiled(Parted(between))
        for _ in range(2):
            run(X).backward()
    assert len(compiled_plans()) == 2
    return [str(one.message) for one in said if "ran eagerly between" in str(one.message)]


def test_ops_between_two_graphs_that_save_for_backward_are_warned_about_once() -> None:
    (text,) = warnings_of_eager_ops(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    assert "GeluBackward0" in text


def test_nothing_is_said_of_a_graph_break_that_saves_nothing() -> None:
    assert not warnings_of_eager_ops(lambda x: x.view(6, 8))
