"""The key of a compiled plan: the same in each process, another where anything counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat.compile import start
from remat.compile.graph_context import read_options
from remat.compile.start import start_key
from tests.paths import ROOT


class Small(nn.Module):
    """A model whose graph has parameters, a buffer, a draw and a number."""

    def __init__(self, width: int = 4, p: float = 0.5, factor: float = 2.0) -> None:
        super().__init__()
        self.linear, self.drop, self.factor = nn.Linear(width, width), nn.Dropout(p), factor
        self.register_buffer("shift", torch.ones(width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.drop(self.linear(x) + self.shift) * self.factor + y).sum()


class Other(Small):
    """The same parameters, another op."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.drop(self.linear(x) - self.shift) * self.factor + y).sum()


def captured(model: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, Sequence[Any]]:
    """What a backend of dynamo's is handed."""
    seen: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append((gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=capture)(*inputs)
    return seen[0]


def key_of(
    model: nn.Module | None = None, inputs: Sequence[Tensor] = (), around: str = "", **options: Any
) -> str:
    graph, given = captured(model or Small(), *(inputs or (torch.ones(2, 4), torch.ones(2, 4))))
    return start_key(graph, given, read_options({"budget": "60%", **options}), around)


@pytest.mark.slow
def test_the_key_is_the_same_in_another_process() -> None:
    code = "from tests.remat.compile.test_start_key import key_of; print(key_of())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == key_of() == key_of()


X = torch.ones(2, 4)
GRAPHS: dict[str, Callable[[], str]] = {
    "an op": lambda: key_of(Other()),
    "a probability": lambda: key_of(Small(p=0.25)),
    "a number": lambda: key_of(Small(factor=3.0)),
    "a width": lambda: key_of(Small(8), (torch.ones(2, 8), torch.ones(2, 8))),
    "a batch": lambda: key_of(inputs=(torch.ones(3, 4), torch.ones(3, 4))),
    "strides": lambda: key_of(inputs=(torch.ones(4, 2).t(), torch.ones(2, 4))),
    "a dtype": lambda: key_of(inputs=(torch.ones(2, 4), torch.ones(2, 4).double())),
    "an alias": lambda: key_of(inputs=(one := torch.ones(2, 4), one.view(2, 4))),
    "a gradient": lambda: key_of(inputs=(torch.ones(2, 4), X.clone().requires_grad_())),
    "a frozen parameter": lambda: key_of(Small().requires_grad_(False)),
    "eval": lambda: key_of(Small().eval()),
    "graphs before": lambda: key_of(around="another"),
}
OPTIONS: dict[str, Any] = {
    "budget": "61%", "solver": "cut", "gap": 0.002, "time_limit_s": 9.0, "replays": 7, "calls": 2,
    "keep": ["linear"], "recompute": ["drop"],
}  # fmt: skip


@pytest.mark.parametrize("what", GRAPHS)
def test_another_graph_has_another_key(what: str) -> None:
    assert GRAPHS[what]() != key_of()


@pytest.mark.parametrize("name", OPTIONS)
def test_another_option_has_another_key(name: str) -> None:
    assert key_of(**{name: OPTIONS[name]}) != key_of()


KINDS = [  # all of them, so that only their order is another
    SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]  # fmt: skip
SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "Inductor": lambda: inductor_config.patch(max_fusion_size=3),
    "AOTAutograd": lambda: functorch_config.patch(functionalize_rng_ops=True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "gradients": torch.no_grad,
    "a kind of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "the order of kinds": lambda: sdpa_kernel(KINDS, set_priority=True),
    "nothing": nullcontext,
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_torch_are_in_the_key(what: str) -> None:
    graph, given = captured(Small(), torch.ones(2, 4), torch.ones(2, 4))
    asked = read_options({"budget": "60%"})
    with SETTINGS[what]():
        changed = start_key(graph, given, asked, "")
    assert (changed == start_key(graph, given, asked, "")) is (what == "nothing")


def test_machine_releases_and_rank_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, given = captured(Small(), torch.ones(2, 4), torch.ones(2, 4))
    asked = read_options({"budget": "60%"})
    keys = {start_key(graph, given, asked, "")}
    for owner, name, value in (
        (start, "cpu_title", lambda: "another CPU, 3 threads"),
        (start, "sources_key", lambda: "another release"),
        (torch, "__version__", "2.99.0"),
        (dist, "is_initialized", lambda: True),
        (dist, "get_world_size", lambda: 4),
        (dist, "get_rank", lambda: 0),
        (dist, "get_rank", lambda: 3),
    ):
        monkeypatch.setattr(owner, name, value)
        if name != "is_initialized" and name != "get_world_size":
            keys.add(start_key(graph, given, asked, ""))
    assert len(keys) == 6


def test_an_object_that_says_only_where_it_lies_has_no_key() -> None:
    graph, given = captured(Small(), torch.ones(2, 4), torch.ones(2, 4))
    call = next(node for node in graph.graph.nodes if node.op == "call_function")
    call.kwargs = {**call.kwargs, "more": object()}
    assert start_key(graph, given, read_options({"budget": "60%"}), "") == ""
