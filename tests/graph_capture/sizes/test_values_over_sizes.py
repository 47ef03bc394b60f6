"""Code that looks at values which depend on sizes alone, traced for a range of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.sizes import trace_over_sizes
from remat.graph_capture.tracing.trace import trace

WIDTH = 4
DYNAMIC = {"x": {0: ("n", 3, 40), 1: ("m", 2, 7)}}


class Asking(nn.Module):
    """Takes another way if what it asks of its sizes is true."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(WIDTH, WIDTH), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (torch.tanh(y) if self.ask(x) else torch.relu(y)).sum()


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]).unsqueeze(0)


def counts_up(x: Tensor) -> Any:
    """As transformers asks of positions."""
    at = positions(x)
    return (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)[:, -1].eq(0).all()


def grid(x: Tensor) -> Any:
    return (torch.arange(x.shape[0])[:, None] + torch.arange(x.shape[1]) >= 0).all()


def halves(x: Tensor) -> Any:
    first, second = torch.arange(x.shape[0] * 2).chunk(2)
    return bool((second - first == x.shape[0]).all())


def tanhs(done: Any) -> bool:
    return any("tanh" in str(node.target) for node in done.joint.module.graph.nodes)


ASKED: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "counts up": (counts_up, True),
    "number": (lambda x: positions(x)[0, 0].item(), False),
    "of two sizes": (grid, True),
    "never": (lambda x: torch.equal(positions(x), positions(x) + 1), False),
    "of a part": (halves, True),
}  # fmt: skip


@pytest.mark.parametrize("what", ASKED)
def test_one_answer_at_all_sizes_is_the_way_of_eager(what: str) -> None:
    ask, answer = ASKED[what]
    done = trace(Asking(ask), (torch.randn(9, 5, WIDTH),), dynamic=DYNAMIC)
    assert done.recipe.flags == (False, False)
    assert tanhs(done) is answer


OPEN: dict[str, Callable[[Tensor], Any]] = {
    "differs": lambda x: (positions(x) > 20).any(),
    "at the last size": lambda x: (positions(x) == 39).any(),
    "of the batch": lambda x: (positions(x) + x.sum() > 0).any(),
    "drawn": lambda x: (positions(x) + torch.rand(x.shape[0]) > 0).any(),
    "written over": lambda x: positions(x).copy_(x[:, 0, 0][None] * 0).any(),
    "through a view": lambda x: _through_a_view(x),
}  # fmt: skip


def _through_a_view(x: Tensor) -> Tensor:
    at = positions(x)
    at[:, :1].add_(x[:1, 0, :1].long())
    return (at >= 0).all()


@pytest.mark.parametrize("what", OPEN)
def test_an_answer_that_sizes_or_the_batch_change_is_refused(what: str) -> None:
    with pytest.raises(CaptureError, match="one static graph cannot hold both branches"):
        trace(Asking(OPEN[what]), (torch.randn(9, 5, WIDTH),), dynamic=DYNAMIC)


def test_a_range_that_is_too_large_to_try_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_over_sizes, "MOST_POINTS", 37)
    with pytest.raises(CaptureError, match="one static graph cannot hold both branches"):
        trace(Asking(counts_up), (torch.randn(9, 5, WIDTH),), dynamic=DYNAMIC)
    monkeypatch.setattr(trace_over_sizes, "MOST_POINTS", 38)
    assert tanhs(trace(Asking(counts_up), (torch.randn(9, 5, WIDTH),), dynamic=DYNAMIC))
