"""Forward hooks of submodules are code of forward: traced, guarded, set as forward sets them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, RematError, StateChangedError

WIDTH = 16
Build = Callable[[], nn.Module]
Change = Callable[[nn.Module, int], None]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def hooked(hook: Any, *, pre: bool = False, **how: Any) -> Build:
    def build() -> nn.Module:
        model = layers()
        register = model[0].register_forward_pre_hook if pre else model[0].register_forward_hook
        register(hook, **how)
        return model

    return build


def train_beside_eager(build: Build, change: Change = lambda model, step: None) -> Any:
    """Three steps of a planned model and of its twin, on changing batches, to the same bits."""
    planned, eager = build(), build()
    eager.load_state_dict(planned.state_dict())
    fast = remat.rematerialize(planned, (torch.randn(8, WIDTH),), budget="120%", time_limit_s=5)
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (planned, eager)]
    for step in range(3):
        change(planned, step)
        change(eager, step)
        x, found = torch.randn(8, WIDTH), list[list[Tensor]]()
        for (_, optimizer), run in zip(pairs, (fast, eager), strict=True):
            results = pytree.tree_leaves(run(x))
            torch.stack([result.sum() for result in results]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([r.detach().clone() for r in results])
        found = [[*r, *m.state_dict().values()] for r, (m, _) in zip(found, pairs, strict=True)]
        assert all(map(torch.equal, *found))
    return fast


def spectral() -> nn.Module:
    model = layers()
    nn.utils.spectral_norm(model[0])
    return model


class Scale:
    scale = 2.0
    calls = 0

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.scale

    def counting(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.calls += 1


EXACT: dict[str, Build] = {
    "changes nothing": hooked(lambda *_: None),
    "returns another result": hooked(lambda module, args, out: out * 2),
    "changes the arguments": hooked(lambda module, args: (args[0] + 1,), pre=True),
    "takes keywords": hooked(lambda module, args, kwargs, out: out + 1, with_kwargs=True),
    "keeps a tensor on its module": hooked(lambda m, args, out: setattr(m, "last", out)),
    "is a method": hooked(Scale().hook),
    "is torch's spectral norm": spectral,
}


@pytest.mark.parametrize("name", EXACT)
def test_a_forward_hook_is_part_of_the_step(name: str) -> None:
    train_beside_eager(EXACT[name])


seen: list[Tensor] = []
calls = {"number": 0}


def count(module: nn.Module, args: Any, out: Tensor) -> None:
    calls["number"] += 1


REFUSED: dict[str, tuple[Any, str]] = {
    "keeps tensors in a list": (lambda m, a, out: seen.append(out), "seen.*or remove the hook"),
    "counts": (count, "an item of global calls.*or remove the hook"),
    "counts on an object": (
        Scale().counting,
        r"(?s)submodule 0 \(Linear\)\.calls outside forward.*changes it from 0 to 1",
    ),
    "prints": (lambda *_: print("called"), r"forward hook on submodule 0 \(Linear\).*calls print"),
    "looks at values": (lambda m, a, out: out * out.mean().item(), "depends on tensor data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_would_not_do_is_refused_at_capture(name: str) -> None:
    hook, text = REFUSED[name]
    with pytest.raises(CaptureError, match=text):
        remat.capture(hooked(hook)(), (torch.randn(8, WIDTH),))
    assert not seen
    assert not calls["number"]


def test_a_backward_hook_is_refused() -> None:
    model = layers()
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"backward hook on submodule 0.*move its work into"):
        remat.capture(model, (torch.randn(8, WIDTH),))


def test_hooks_that_come_go_or_read_another_value_are_noticed() -> None:
    it = Scale()
    handles: dict[nn.Module, Any] = {}

    def build() -> nn.Module:
        model = layers()
        handles[model] = model[2].register_forward_hook(it.hook)
        return model

    changes: dict[str, Change] = {
        r"submodule 0 \(Linear\).*capture and solve again.*the rewritten step": (
            lambda model, step: (model[0].register_forward_hook(lambda *_: None), None)[1]
        ),
        r"submodule 2 \(Linear\) of Sequential was \(Scale.hook,\).* is \(\) now": (
            lambda model, step: handles[model].remove()
        ),
        r"submodule 2 \(Linear\)\.scale of Sequential was 2.0 .* is 3.0 now": (
            lambda model, step: setattr(it, "scale", 3.0)
        ),
    }
    for text, change in changes.items():
        with pytest.raises(StateChangedError, match=text):
            train_beside_eager(build, change)
        it.scale = 2.0


class Library(nn.Module):
    """Sets recording hooks on its layers at its first call, as transformers does."""

    def __init__(self, *, also: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.is_set, self.also, self.factor = False, also, 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.seen: list[Tensor] = []
        if not self.is_set or self.also == "each call":
            self.record(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, tuple(self.seen)

    def record(self, x: Tensor) -> None:
        def note(module: nn.Module, args: Any, out: Tensor) -> None:
            self.seen.append(out * self.factor)

        for layer in self.layers:
            layer.register_forward_hook(note)
        if self.also == "tensor":
            self.layers[0].register_forward_hook(lambda module, args, out: out + x)
        if self.also == "itself":
            self.register_forward_hook(lambda *_: None)
        self.is_set = True


def test_hooks_that_a_library_sets_at_its_first_call_are_set_by_the_first_step() -> None:
    fast = train_beside_eager(Library)
    assert all(len(layer._forward_hooks) == 1 for layer in fast.layers)
    fast.factor = 2.0
    with pytest.raises(StateChangedError, match=r"factor of Library was 1\.0"):
        fast(torch.randn(8, WIDTH))


@pytest.mark.parametrize("also", ["each call", "tensor", "itself"])
def test_hooks_that_no_step_could_set_again_are_refused(also: str) -> None:
    model = Library(also=also)
    with pytest.raises(RematError, match=r"next call|its batch"):
        remat.capture(model, (torch.randn(8, WIDTH),))
    assert not any(layer._forward_hooks for layer in (model, *model.layers))


def test_eager_may_run_first_and_all_may_be_put_back() -> None:
    def first(model: nn.Module, step: int) -> None:
        if step == 0:
            with torch.no_grad():
                model(torch.randn(8, WIDTH))
        if step == 2:
            model.is_set = False
            for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
                layer._forward_hooks.clear()

    train_beside_eager(Library, first)


def test_hooks_that_are_gone_while_forward_believes_them_set_are_noticed() -> None:
    def remove(model: nn.Module, step: int) -> None:
        for layer in model.layers if step else []:  # pyright: ignore[reportGeneralTypeIssues]
            layer._forward_hooks.clear()

    with pytest.raises(StateChangedError, match=r"submodule layers\.0 \(Linear\).* is \(\) now"):
        train_beside_eager(Library, remove)


def test_a_copy_sets_its_own_hooks() -> None:
    model = Library()
    fast = remat.rematerialize(model, (torch.randn(8, WIDTH),), budget="120%", time_limit_s=5)
    other = copy.deepcopy(fast)
    other(torch.randn(8, WIDTH))
    assert [other.is_set, *(len(layer._forward_hooks) for layer in other.layers)] == [True, 1, 1]
    assert [model.is_set, *(len(layer._forward_hooks) for layer in model.layers)] == [False, 0, 0]


scale: ContextVar[float] = ContextVar("scale", default=1.0)


def test_a_context_variable_that_forward_reads_is_compared() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * scale.get()

    def change(model: nn.Module, step: int) -> None:
        if step:
            scale.set(2.0)

    train_beside_eager(Scaled)
    with pytest.raises(StateChangedError, match="global scale of"):
        train_beside_eager(Scaled, change)
