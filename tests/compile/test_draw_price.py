"""What a random number costs, measured by a kernel of Inductor's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.compile_search import Candidate, PlanSearch
from remat.graph_capture.price_cache import PriceCache
from remat.rewriter import draw_price
from remat.rewriter.draw_price import DRAW_KEY, draw_us_per_element


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))


def test_it_is_measured_once_in_the_middle_of_a_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[float] = []
    stock = PlanSearch.stock

    def measuring(self: PlanSearch) -> Candidate:
        found.append(draw_us_per_element(PriceCache()))
        return stock(self)

    monkeypatch.setattr(PlanSearch, "stock", measuring)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    state = torch.get_rng_state()
    compiled = torch.compile(model, backend="remat", options={"budget": "100%", "replays": 1})
    compiled(torch.ones(64, 8)).sum().backward()
    plan = remat.compiled_plans()[-1]
    torch._dynamo.reset()
    assert plan.peak_bytes <= plan.budget_bytes
    assert 2e-4 / torch.get_num_threads() < found[0] < 1, "microseconds for one number"
    assert not torch.equal(state, torch.get_rng_state()), "the step has drawn its seed"

    def fails(draws: bool) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(draw_price, "_kernel", fails)
    assert draw_us_per_element(PriceCache()) == found[0], "read from the file"
    assert DRAW_KEY in PriceCache().prices


def test_the_kernel_draws() -> None:
    (drawn,) = draw_price._kernel(draws=True)()
    (written,) = draw_price._kernel(draws=False)()
    assert drawn.shape == written.shape == (draw_price.ELEMENTS,)
    assert 0.49 < float(drawn.mean()) < 0.51
    assert drawn.unique().numel() > draw_price.ELEMENTS // 2
    assert written.unique().numel() == 1
