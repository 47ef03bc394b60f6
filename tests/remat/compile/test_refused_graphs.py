"""What no plan under torch.compile can hold is refused before it runs, with a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

import remat
from remat.graph_capture.errors import CaptureError, RematError, RewriteError
from tests.limits import AMPLE_S

OPTIONS = {"budget": "100%", "replays": 1, "solver": "cut", "time_limit_s": AMPLE_S}


class Layers(nn.Module):
    """Three weights, each used by a function."""

    def __init__(self, layer: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.layer(x, weight)
        return x.square().mean()


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(model, backend="remat", options={**OPTIONS, **options})


def refused(model: nn.Module, text: str, x: Tensor, kind: type[RematError] = CaptureError) -> None:
    with pytest.raises(BackendCompilerFailed, match=text) as caught:
        compiled(model)(x)
    assert isinstance(caught.value.inner_exception, kind)


def as_eager(model: nn.Module, x: Tensor, **options: Any) -> None:
    """A compiled step gives eager's gradients."""
    compiled(model, **options)(x).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@torch.compiler.nested_compile_region
def region(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def dropped_in_branch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cond(  # pyright: ignore
        x.sum() > -1e9, lambda x: functional.dropout(x @ weight, 0.5), lambda x: x @ weight, (x,)
    )


def branched(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cond(  # pyright: ignore
        x.sum() > -1e9, lambda x: torch.tanh(x @ weight), lambda x: torch.sin(x @ weight), (x,)
    )


def test_a_nested_compile_region_is_refused_at_its_line() -> None:
    text = r"leave out torch.compiler.nested_compile_region.*test_refused_graphs.py:\d+"
    refused(Layers(region), text, torch.randn(64, 32))


def test_a_branch_that_draws_is_refused_at_its_line() -> None:
    text = r"that cond runs draws random numbers \(.*test_refused_graphs.py:\d+\)"
    refused(Layers(dropped_in_branch), text, torch.randn(64, 32))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Inductor's code has a:UserWarning")
def test_a_branch_that_draws_nothing_trains_as_eager() -> None:
    as_eager(Layers(branched), torch.randn(64, 32), budget="min")


def test_a_branch_reads_what_was_drawn_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out that the refusal names."""

    def drawn_before(x: Tensor, weight: Tensor) -> Tensor:
        kept = torch.rand_like(x) > 0.5
        return torch.cond(  # pyright: ignore
            x.sum() > -1e9, lambda x, k: (x @ weight) * k, lambda x, k: x @ weight, (x, kept)
        )

    monkeypatch.setattr("remat.rewriter.inductor.partition.FusedStep.replay", stopped)
    with pytest.raises(BackendCompilerFailed, match="it came as far as the replay"):
        compiled(Layers(drawn_before))(torch.randn(64, 32))


def stopped(self: Any, pair: Any) -> None:
    raise ValueError("it came as far as the replay")


def test_sizes_that_depend_on_data_are_refused() -> None:
    def picked(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight)[(x > 0).any(1).nonzero().flatten()]

    captured = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    for is_marked in (False, True):
        torch._dynamo.reset()
        x = torch.randn(64, 32)
        if is_marked:
            torch._dynamo.mark_dynamic(x, 0)
        with torch._dynamo.config.patch(captured):
            refused(Layers(picked), r"to False.* size that depends on data, \[u0, 1\]", x)


@pytest.mark.slow
def test_dimensions_that_may_be_dynamic_are_planned_for() -> None:
    x = torch.randn(64, 32)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    as_eager(Layers(torch.matmul), x)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(50, 32, sparse=True), nn.Linear(32, 32))
    refused(model, r"sparse=False.*makes a sparse tensor", torch.randint(50, (64,)))


def test_compiled_autograd_is_refused_when_compiled_and_at_each_forward() -> None:
    x, text = torch.randn(64, 32), "leave out .*compiled autograd recompiles backward"
    with torch._dynamo.config.patch(compiled_autograd=True):
        refused(Layers(torch.matmul), text, x, RewriteError)
    torch._dynamo.reset()
    step = compiled(Layers(torch.matmul))
    step(x).backward()
    inner: Any = torch.compile(backend="eager")
    with compiled_autograd._enable(inner), pytest.raises(RewriteError, match=text):
        step(x)


def test_what_is_compiled_already_is_refused_by_capture() -> None:
    x = torch.randn(64, 32)
    plain = nn.Sequential(nn.Linear(32, 32), nn.GELU())
    wrapped: Any = torch.compile(plain)
    with pytest.raises(CaptureError, match=r"the model is wrapped by torch.compile.*\._orig_mod"):
        remat.capture(wrapped, (x,))
    with pytest.raises(CaptureError, match=r"^1 is wrapped by torch.compile"):
        remat.capture(nn.Sequential(nn.Linear(32, 32), wrapped), (x,))
    assert remat.capture(wrapped._orig_mod, (x,)).ops
    plain[0].compile()
    with pytest.raises(
        CaptureError,
        match=r"compile\(\) on 0, .*_compiled_call_impl = None: compiled code cannot be traced",
    ):
        remat.capture(plain, (x,))
    plain[0]._compiled_call_impl = None
    assert remat.capture(plain, (x,)).ops


def test_functions_that_dynamo_runs_are_refused_by_capture() -> None:
    x, wrapped = torch.randn(64, 32), torch.compile(torch.matmul)
    text = r"wrapped by torch.compile, torch.cond.*test_refused_graphs.py:\d+"
    for layer in (wrapped, branched):
        with pytest.raises(CaptureError, match=text):
            remat.capture(Layers(layer), (x,))
    assert remat.capture(Layers(wrapped._torchdynamo_orig_callable), (x,)).ops  # pyright: ignore
