"""Graphs of symbolic sizes: one compilation of dynamo's, a plan for each size that comes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

from remat.compile.backend import SizeTable
from remat.compile.graph_context import CompiledPlan, compiled_plans
from remat.compile.specialize import has_symbols, numbered, symbols_of
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.errors import BudgetError
from tests.limits import AMPLE_S

OPTIONS = {"replays": 4, "solver": "cut", "time_limit_s": AMPLE_S, "budget": "70%"}


class Net(nn.Module):
    """Two parts of linear layers and activations; a graph break between them, if asked for."""

    def __init__(self, *, is_split: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.is_split = part(drop), part(drop), is_split

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_split:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()


def part(drop: float) -> nn.Sequential:
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(drop))]
    return nn.Sequential(*layers)


def marked(rows: int) -> Tensor:
    torch.manual_seed(rows)
    x = torch.randn(rows, 32)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    run(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def require_peak_within(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> None:
    plan = compiled_plans()[-1]
    model.zero_grad()
    held_bytes = x.nbytes + sum(p.nbytes for p in model.parameters())
    measured = held_bytes + measure_peak(lambda: run(x).backward())
    assert measured <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(measured, rel=0.01)


def graph_of(function: Any, *args: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The graph that dynamo hands to a backend, and inputs as it passes them."""
    found: list[Any] = []

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            found[:] = [gm, list(given)]
            return gm(*given)

        return run

    torch.compile(function, backend=keep)(*args)
    gm, given = found
    return gm, given


def test_symbols_are_named_by_the_dimension_they_are_of() -> None:
    gm, given = graph_of(lambda x: x.sum() * x.shape[0], marked(8))
    assert has_symbols(gm)
    ((place, name),) = symbols_of(gm).items()
    assert name == "dimension 0 of x"
    assert given[place] == 8
    plain, _ = graph_of(lambda x: x.sum(), torch.ones(3, 4))
    assert not has_symbols(plain)
    assert symbols_of(plain) == {}


def test_a_number_that_varies_is_named() -> None:
    found: list[dict[int, str]] = []

    def look(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        found.append(symbols_of(gm))
        return gm.forward

    run = torch.compile(lambda x, times: x * times, backend=look)
    run(torch.ones(4), 2)
    run(torch.ones(4), 3)
    assert list(found[-1].values()) == ["the number times"]


def test_a_copy_with_numbers_computes_the_same() -> None:
    gm, given = graph_of(lambda x: x.view(-1, x.shape[0] * 2).sum(0) / x.shape[0], marked(8))
    (place,) = symbols_of(gm)
    made, inputs = numbered(gm, {place: 8}, given)
    assert len(inputs) == len(given) - 1
    assert [tuple(t.shape) for t in inputs] == [(8, 32)]
    assert not has_symbols(made)
    assert has_symbols(gm), "the graph of dynamo's is as it was"
    x = given[1 - place]
    assert torch.equal(made(x)[0], gm(*given)[0])


def table_over(planned: list[str], most: int = 16) -> tuple[SizeTable, int]:
    """A table that notes for which sizes it is asked to compile, and where the number stands."""
    gm, _ = graph_of(lambda x: x.sum() * x.shape[0], marked(8))

    def compile_one(one: fx.GraphModule, _: Any, number: int, sizes: str) -> Callable[..., Any]:
        planned.append(f"{number}: {sizes}")
        return one.forward

    return SizeTable(gm, compile_one, most), next(iter(symbols_of(gm)))


def call(table: SizeTable, place: int, rows: int) -> Tensor:
    given: list[Any] = [torch.ones(rows, 32)]
    given.insert(place, rows)
    return table(*given)[0]


def test_each_size_is_planned_once() -> None:
    planned: list[str] = []
    table, place = table_over(planned)
    assert call(table, place, 8) == 8 * 8 * 32
    with pytest.warns(
        UserWarning, match=r"(?s)remat.rematerialize.*dimension 0 of x was 8 and is 9: "
    ):
        call(table, place, 9)
    for rows in (8, 9):
        assert call(table, place, rows) == rows * rows * 32
    assert planned == ["0: dimension 0 of x = 8", "1: dimension 0 of x = 9"]


@pytest.mark.filterwarnings("ignore:dimension 0")
def test_what_was_not_used_for_longest_is_dropped() -> None:
    planned: list[str] = []
    table, place = table_over(planned, most=2)
    call(table, place, 8)
    call(table, place, 9)
    call(table, place, 8)
    with pytest.warns(UserWarning, match=r"There were 3 sizes, and the code for 2 is kept"):
        call(table, place, 10)
    call(table, place, 8)
    assert len(planned) == 3
    call(table, place, 9)
    assert planned[3] == planned[1], "under the number that it had"


@pytest.mark.filterwarnings("ignore:dimension 0")
def test_a_size_that_fails_is_not_kept() -> None:
    gm, given = graph_of(lambda x: x.sum() * x.shape[0], marked(8))
    tries: list[int] = []

    def fails(*_: Any) -> Any:
        tries.append(1)
        raise BudgetError("too small")

    table = SizeTable(gm, fails)
    for _ in range(2):
        with pytest.raises(BudgetError):
            table(*given)
    assert len(tries) == 2


@pytest.mark.filterwarnings("ignore:dimension 0")
def test_the_random_stream_and_settings_stay_while_a_size_is_planned() -> None:
    gm, given = graph_of(lambda x: x.sum() * x.shape[0], marked(8))

    def draws(one: fx.GraphModule, *_: Any) -> Any:
        torch.rand(3)
        return one.forward

    before = torch.get_rng_state()
    SizeTable(gm, draws)(*given)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:dimension 0")
def test_marked_dimensions_are_planned_for_within_one_compilation() -> None:
    model = Net()
    options = {**OPTIONS, "replays": 1, "budget": "100%"}
    compiled = torch.compile(model, backend="remat", options=options)
    counters.clear()
    for rows in (64, 48):
        x = marked(rows)
        found = gradients(model, x, compiled)
        torch.testing.assert_close(found, gradients(model, x, model))
    assert counters["stats"]["unique_graphs"] == 1
    sizes = [plan.sizes for plan in compiled_plans()]
    assert sizes == ["dimension 0 of x = 64", "dimension 0 of x = 48"]
    assert "at dimension 0 of x = 48: peak" in repr(compiled_plans()[-1])


@functools.cache
def alone() -> CompiledPlan:
    """The plan of 2048 rows, compiled for no other number."""
    torch._dynamo.reset()
    options = {**OPTIONS, "warm": False}
    compiled = torch.compile(Net(), backend="remat", dynamic=False, options=options)
    compiled(torch.randn(2048, 32)).backward()
    return compiled_plans()[-1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dimension 0")
@pytest.mark.parametrize("how", ["marked", "dynamic", "automatic"])
def test_every_size_keeps_to_the_budget(how: str) -> None:
    """The plans are those of a shape that is compiled alone; so are the peaks."""
    model = Net()
    asked = {"dynamic": True} if how == "dynamic" else {}
    compiled = torch.compile(model, backend="remat", options=OPTIONS, **asked)
    counters.clear()
    by_rows: dict[int, CompiledPlan] = {}
    for rows in (4096, 2048, 512):
        x = marked(rows) if how == "marked" else torch.randn(rows, 32)
        found = gradients(model, x, compiled)
        require_peak_within(model, x, compiled)
        torch.testing.assert_close(found, gradients(model, x, model))
        by_rows[rows] = compiled_plans()[-1]
    assert len(compiled_plans()) == 3
    assert counters["stats"]["unique_graphs"] == (2 if how == "automatic" else 1)
    assert alone().peak_bytes == by_rows[2048].peak_bytes
    assert alone().schedule == by_rows[2048].schedule


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dimension 0")
def test_graphs_of_a_split_model_share_the_budget_at_each_size() -> None:
    model = Net(is_split=True)
    compiled = torch.compile(model, backend="remat", options=OPTIONS)
    for rows in (4096, 2048, 1024):
        x = marked(rows)
        found = gradients(model, x, compiled)
        require_peak_within(model, x, compiled)
        torch.testing.assert_close(found, gradients(model, x, model))
    frames = [plan.frame for plan in compiled_plans()]
    assert len(set(frames)) == 6
    assert {frame.count("/") for frame in frames} == {1, 2}, "what was not marked begins with one"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dimension 0")
def test_dropout_draws_what_the_same_step_with_everything_kept_draws() -> None:
    found: list[list[Tensor]] = []
    for budget in ("100%", "70%"):
        torch._dynamo.reset()
        model = Net(drop=0.2)
        compiled = torch.compile(model, backend="remat", options={**OPTIONS, "budget": budget})
        gradients(model, marked(1024), compiled)
        found.append(gradients(model, marked(2048), compiled))
    torch.testing.assert_close(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dimension 0")
def test_two_forwards_before_backward_need_room_for_both_at_each_size() -> None:
    model = Net()
    compiled = torch.compile(model, backend="remat", options={**OPTIONS, "budget": "60%"})
    for rows in (4096, 2048):
        x = marked(rows)
        compiled(x).backward()
        text = re.compile(r"Graph 0/0/\d is called with 1 forwards")
        with pytest.raises(BudgetError, match=text):
            (compiled(x) + compiled(x)).backward()


def test_without_gradients_inductor_serves_all_sizes() -> None:
    model = Net()
    compiled = torch.compile(model, backend="remat", options=OPTIONS)
    with torch.no_grad():
        for rows in (8, 9, 10):
            x = marked(rows)
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled_plans() == ()


@pytest.mark.slow
def test_a_budget_that_a_size_does_not_fit_is_refused_at_that_size() -> None:
    compiled = torch.compile(Net(), backend="remat", options={**OPTIONS, "budget": "40KiB"})
    with pytest.raises(BudgetError, match=r"budget of 40.0 KiB is below .* the lowest peak"):
        compiled(marked(64))
