"""`rematerialize(dynamic=...)`: one plan for a range that is learned, extended, or refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import remat
from remat.caches.per_shape_plans import PlanCache
from remat.graph_capture.errors import CaptureError, TooLargeError
from remat.schedules.family import Family
from tests.beside_eager import same_bits
from tests.sized_models import SIZED, gpt, resnet
from tests.steps import schedules_of


class Rows(nn.Module):
    """A few layers over rows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *[m for _ in range(4) for m in (nn.Linear(width, width), nn.Tanh())]
        )
        self.scale = 1

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).pow(2).mean()


def rows(count: int, width: int = 32) -> tuple[Tensor, ...]:
    return (torch.randn(count, width),)


def cached(model: nn.Module, budget: Any = "100%", **options: Any) -> PlanCache:
    asked: dict[str, Any] = {"dynamic": "auto", "solver": "cut", "check": False}
    return remat.rematerialize(model, budget=budget, **{**asked, **options})


def planned_ranges(cache: PlanCache) -> list[str]:
    """What the plans are for, in words."""
    return [
        ", ".join(map(str, plan.symbols)) if isinstance(plan, Family) else "one size"
        for plan in schedules_of(cache)
    ]


def test_a_range_is_learned_from_the_second_size_and_extended_by_a_larger_one() -> None:
    model = Rows()
    cache = cached(model)
    expected = {
        40: "one size", 64: "x_0 from 2 to 64", 9: "x_0 from 2 to 64", 65: "x_0 from 2 to 128",
        128: "x_0 from 2 to 128", 2: "x_0 from 2 to 128",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for count, said in expected.items():
            assert same_bits(model, cache, rows(count))
            assert planned_ranges(cache) == [said]
        assert same_bits(model, cache, rows(1))
    assert planned_ranges(cache) == ["x_0 from 2 to 128", "one size"]


@pytest.mark.slow
def test_a_batch_that_cannot_fit_is_refused_with_the_largest_that_does() -> None:
    model = Rows()
    graph = remat.capture(model, rows(100))
    cache = cached(model, remat.solve(graph, "100%").peak_bytes)
    cache(*rows(40)), cache(*rows(50))
    assert planned_ranges(cache) == ["x_0 from 2 to 50"]
    cache(*rows(60))  # twice 50 fits
    assert planned_ranges(cache) == ["x_0 from 2 to 100"]
    with pytest.raises(TooLargeError) as refused:
        cache(*rows(900))
    largest = refused.value.largest["x_0"]
    assert largest >= 140  # which a solver is known to reach; a better one reaches further
    assert f"plan a range up to x_0 {largest}, the largest that fits" in str(refused.value)
    assert same_bits(model, cache, rows(70))
    assert same_bits(model, cache, rows(101))  # twice 100 does not, so as far as it does
    assert planned_ranges(cache) == [f"x_0 from 2 to {largest}"]
    assert same_bits(model, cache, rows(largest))


@pytest.mark.slow
def test_the_worst_case_is_planned_before_the_first_step() -> None:
    model = Rows()
    cache = cached(model, upto={"x": {0: 200}})
    cache(*rows(3))
    assert planned_ranges(cache) == ["x_0 from 2 to 200"]
    budget = remat.solve(remat.capture(model, rows(100)), "100%").peak_bytes
    ran: list[int] = []
    late = cached(model, budget, upto={"n": 900}, dynamic={"x": {0: "n"}})
    with pytest.raises(TooLargeError, match=r"up to n 1\d\d, .*n 900 was found"):
        ran.append(late(*rows(3)))
    assert ran == []


@pytest.mark.slow
def test_named_sizes_are_taken_and_other_dimensions_have_a_family_each() -> None:
    sized = SIZED["experts"]()
    cache = cached(sized.model, dynamic={"x": {0: ("tokens", 4, 60)}})
    for tokens in (5, 60, 30):
        assert same_bits(sized.model, cache, sized.batch(tokens=tokens))
    assert planned_ranges(cache) == ["tokens from 4 to 60"]
    assert same_bits(sized.model, cache, sized.batch(tokens=3))
    assert planned_ranges(cache) == ["tokens from 3 to 60"]


def test_a_size_that_the_model_fixes_has_plans_of_its_own_and_its_line_is_named() -> None:
    model = Branching()
    cache = cached(model)
    cache(*rows(4))
    with pytest.warns(UserWarning, match=r"(?s)cannot vary .*test_cache_over_ranges.py:\d+"):
        assert same_bits(model, cache, rows(6))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert same_bits(model, cache, rows(8))
    assert planned_ranges(cache) == ["one size"] * 3


class Branching(Rows):
    """Every model count of rows takes anmodel way."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y.relu().mean() if x.shape[0] % 2 == 0 else y.mean()


@pytest.mark.slow
def test_what_changes_is_traced_again_and_named_where_it_keeps_changing() -> None:
    model = Rows()
    cache = cached(model)
    cache(*rows(4)), cache(*rows(6))
    model.body[1].eval()
    assert same_bits(model, cache, rows(5))
    assert len(remat.plans(cache)) == 2
    model.body[1].train()
    assert same_bits(model, cache, rows(3))
    assert len(remat.plans(cache)) == 2
    model.body[0].weight.requires_grad_(False)
    model.scale = 3
    cache(*rows(3))
    assert len(remat.plans(cache)) == 3
    model.scale = 4
    with pytest.warns(UserWarning, match=r"(?s)this is plan 4 .*scale of Rows was 3"):
        cache(*rows(3))


@pytest.mark.slow
def test_copies_and_pickles_learn_anew() -> None:
    model = Rows()
    cache = cached(model, upto={"x": {0: 20}})
    cache(*rows(4))
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert remat.plans(other) == []
        assert torch.equal(other(*(x := rows(7))), model(*x))
        assert planned_ranges(other) == ["x_0 from 2 to 20"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dynamic": "all"}, "dynamic='all' is unknown"),
        ({"cuda_graphs": True}, "cuda_graphs is not taken with dynamic sizes"),
        ({"dynamic": "auto", "upto": 2048}, "give the largest sizes .*upto=2048 is not a dict"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(options: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        cached(Rows(), **options)


@pytest.mark.parametrize(
    ("upto", "said"),
    [
        ({"y": {0: 9}}, "name one of x.*not a tensor of the batch"),
        ({"n": 9}, "upto names 'n' with 9"),
        ({"x": {5: 9}}, "dimension 5"),
        ({"x": {0: 1}}, r"begin the range at 2|not a range of sizes"),
    ],
)
def test_what_upto_cannot_mean_is_refused_before_the_first_step(upto: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        cached(Rows(), upto=upto)(*rows(4))


@pytest.mark.slow
def test_a_gpt_over_batches_and_lengths() -> None:
    sized = gpt()
    most = {0: 8, 1: 128}
    cache = cached(sized.model, "60%", upto={"tokens": most, "targets": most})
    for size in ((4, 48), (8, 128), (2, 17), (1, 60), (1, 128), (7, 99)):
        assert same_bits(sized.model, cache, sized.batch(batch=size[0], seq=size[1]))
    assert planned_ranges(cache) == [
        "tokens_1 from 2 to 128",
        "tokens_0 from 2 to 8, tokens_1 from 2 to 128",
    ]


@pytest.mark.slow
def test_where_an_op_chooses_by_the_size_each_part_has_a_family() -> None:
    sized = resnet()
    cache = cached(sized.model, "75%")
    for count in (4, 8, 20, 40, 6, 17):
        assert same_bits(sized.model, cache, sized.batch(batch=count))
    assert planned_ranges(cache) == ["x_0 from 2 to 8", "x_0 from 16 to 40"]


class Follower(nn.Module):
    """Rows whose targets, and whatever else, come in other arguments of the same length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(width, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        logits = self.outer(self.inner(x).tanh())
        if mask is not None:
            logits = mask @ logits
        return logits if y is None else cross_entropy(logits.flatten(0, -2), y.flatten())


def classes(*size: int) -> Tensor:
    return torch.randint(0, 16, size)


FOLLOWED: dict[str, tuple[dict[int, int], Any, int]] = {
    "kwargs": ({1: 40}, lambda n: ((torch.randn(2, n, 8),), {"y": classes(2, n)}), 8),
    "target": ({1: 40}, lambda n: ((torch.randn(2, n, 8),), {"target": classes(2, n)}), 8),
    "other dimension": ({1: 40}, lambda n: ((torch.randn(1, n, 8), classes(n)), {}), 8),
    "three": (
        {0: 40}, lambda n: ((torch.randn(n, 8), classes(n)), {"mask": torch.randn(n, n)}), 8
    ),
    "as many features": ({0: 40}, lambda n: ((torch.randn(n, 24), classes(n)), {}), 24),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLLOWED)
def test_sizes_that_are_equal_vary_with_the_one_that_upto_names(kind: str) -> None:
    upto, made, width = FOLLOWED[kind]
    model = Follower(width)
    loss_fn = sequence_loss if kind == "target" else None
    cache = cached(model, loss_fn=loss_fn, upto={"x": upto}, time_limit_s=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="each batch size has its own plan")
        for count in (24, 12, 33, 40):
            args, kwargs = made(count)
            expected = Follower(width)
            target = kwargs.pop("target", None)
            given = kwargs if target is None else {**kwargs, "target": target}
            cache.zero_grad()
            loss = cache(*args, **given)
            result = expected(*args, **kwargs)
            if target is not None:
                result = sequence_loss(result, target)
            loss.backward()
            result.backward()
            assert torch.equal(loss, result)
            pairs = zip(model.parameters(), expected.parameters(), strict=True)
            assert all(torch.equal(own.grad, other.grad) for own, other in pairs)  # type: ignore[arg-type]
    assert len(remat.plans(cache)) == 1


def sequence_loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


class Bank(nn.Module):
    """Compares rows with those of a bank, of which there may be as many by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, bank: Tensor) -> Tensor:
        return (self.linear(x) @ self.linear(bank).T).tanh().sum()


def test_a_size_that_was_equal_by_chance_is_told_apart_by_the_next_batch() -> None:
    model = Bank()
    cache = cached(model, upto={"x": {0: 40}}, time_limit_s=5)
    bank = torch.randn(24, 8)
    for count in (24, 30, 7, 24):
        (x,) = rows(count, 8)
        cache.zero_grad()
        cache(x, bank).backward()
        own = model.linear.weight.grad
        expected = torch.autograd.grad(model(x, bank), model.linear.weight)[0]
        assert torch.equal(own, expected)  # type: ignore[arg-type]
    assert planned_ranges(cache) == ["x_0 from 2 to 40"]


def test_what_does_not_fit_for_a_size_that_follows_by_chance_fits_without() -> None:
    """With 400 rows of the bank, 400 x 400 products would not fit."""
    cache = cached(Bank(), "600KiB", upto={"x": {0: 400}}, time_limit_s=5)
    cache(torch.randn(24, 8), torch.randn(24, 8)).backward()
    assert planned_ranges(cache) == ["x_0 from 2 to 400"]
    both = cached(Bank(), "600KiB", upto={"x": {0: 400}, "bank": {0: 400}}, time_limit_s=5)
    with pytest.raises(TooLargeError):
        both(torch.randn(24, 8), torch.randn(24, 8))


class OtherOpsAtAnySize(Rows):
    """Takes another sum where sizes are symbols, as a mask that is not known then."""

    def forward(self, x: Tensor) -> Tensor:
        rounds = 1 if isinstance(x.shape[0], int) else 3
        return (self.body(x) / rounds).pow(2).mean() * rounds


def test_sizes_have_a_plan_each_where_a_range_gives_other_bits() -> None:
    model = OtherOpsAtAnySize()
    cache = cached(model, check=True)
    assert same_bits(model, cache, rows(4))
    with pytest.warns(
        UserWarning,
        match="(?s)each batch size has its own plan.* the rewritten .* differs from eager",
    ):
        assert same_bits(model, cache, rows(6))
    assert planned_ranges(cache) == ["one size", "one size"]
