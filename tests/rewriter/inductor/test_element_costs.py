"""What an element of a slow part costs, measured by a kernel of Inductor's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import inductor_prims

from remat.compile.graph_context import compiled_plans
from remat.compile.plan_search import Candidate, PlanSearch
from remat.graph_capture.costs.cache import CostCache
from remat.rewriter.inductor import kernel_costs
from remat.rewriter.inductor.kernel_costs import (
    BYTE,
    DRAW,
    ELEMENTS,
    KEY,
    slow_part,
    us_per_element,
)

pytestmark = pytest.mark.usefixtures("clocked")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))


@pytest.mark.slow
def test_it_is_measured_once_in_the_middle_of_a_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[float] = []
    stock = PlanSearch.stock

    def measuring(self: PlanSearch) -> Candidate:
        found.append(us_per_element([DRAW], CostCache())[DRAW])
        return stock(self)

    monkeypatch.setattr(PlanSearch, "stock", measuring)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    state = torch.get_rng_state()
    compiled = torch.compile(model, backend="remat", options={"budget": "100%", "replays": 1})
    compiled(torch.ones(64, 8)).sum().backward()
    plan = compiled_plans()[-1]
    torch._dynamo.reset()
    assert plan.peak_bytes <= plan.budget_bytes
    assert not torch.equal(state, torch.get_rng_state()), "the step has drawn its seed"

    def fails(part: str) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(kernel_costs, "_kernel", fails)
    assert us_per_element([DRAW], CostCache())[DRAW] == found[0], "read from the file"
    assert f"{KEY} {DRAW}" in CostCache().costs


@pytest.mark.slow
def test_the_kernel_draws() -> None:
    (drawn,) = kernel_costs._kernel(DRAW)()
    numbers = drawn / torch.linspace(0.5, 2.0, ELEMENTS)
    assert 0.49 < float(numbers.mean()) < 0.51
    assert numbers.unique().numel() > ELEMENTS // 2


@pytest.mark.slow
def test_the_kernels_compute_what_is_costed() -> None:
    x = torch.linspace(0.5, 2.0, ELEMENTS)
    for part, expected in (("", 1.5 * x), ("erf", x * x.erf()), (BYTE, x)):
        (found,) = kernel_costs._kernel(part)()
        torch.testing.assert_close(found, expected)


@pytest.mark.clock
def test_a_random_number_takes_less_than_a_microsecond() -> None:
    assert 2e-4 / torch.get_num_threads() < us_per_element([DRAW], CostCache())[DRAW] < 1


@pytest.mark.clock
def test_an_error_function_takes_longer_than_a_copy() -> None:
    assert us_per_element(["erf"], CostCache())["erf"] > 1e-4 / torch.get_num_threads()


def test_slow_parts_are_told_from_what_is_as_fast_as_a_copy() -> None:
    graph = fx.Graph()
    mask, x = graph.placeholder("mask"), graph.placeholder("x")
    mask.meta["val"], x.meta["val"] = torch.ones(2, dtype=torch.uint8), torch.ones(2)
    convert = torch.ops.prims.convert_element_type.default
    made = {
        BYTE: (convert, (mask, torch.float32)),
        "": (convert, (x, torch.float64)),
        "tanh": (torch.ops.aten.tanh.default, (x,)),
        DRAW: (inductor_prims.random, ([2], x, "rand")),
    }
    for part, (target, args) in made.items():
        assert slow_part(graph.call_function(target, args)) == part
    assert slow_part(graph.call_function(torch.ops.aten.mul.Tensor, (x, x))) == ""
