"""One plan for each shape: bits as eager's, no more plans than shapes, refusals."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.caches.per_shape_plans import PlanCache
from remat.graph_capture.errors import BudgetError, CaptureError, RewriteError, SolverError
from remat.graph_capture.spill_files import HOST_FOLDER
from tests.behaviours.trainee import read_again
from tests.block_models import WIDTH, Stack
from tests.rewriter.tiers.plans import is_clean, same, step
from tests.steps import schedules_of

LENGTHS = (24, 40, 32)


class Tagger(nn.Module):
    """Sequences in, a class for each token out; with dropout and a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        body = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
        self.body, self.norm, self.head = (
            nn.Sequential(*body),
            nn.BatchNorm1d(64),
            nn.Linear(64, 50),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.body(self.embed(tokens)).transpose(1, 2))
        return self.head(hidden.transpose(1, 2)).flatten(0, 1)


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target.flatten())


def batches(rounds: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    sizes = [(16, length) for _ in range(rounds) for length in LENGTHS]
    return [(torch.randint(50, size), torch.randint(50, size)) for size in sizes]


def cached(model: nn.Module, **options: Any) -> PlanCache:
    return remat.rematerialize(model, budget="75%", loss_fn=loss_of, solver="cut", **options)


def trained(model: nn.Module, step: Any) -> list[Tensor]:
    """The losses of a loop over three lengths, then the state of the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    losses: list[Tensor] = []
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = step(tokens, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


def test_a_loop_over_three_lengths_makes_three_plans_and_trains_as_eager_does() -> None:
    eager = tagger()
    expected = trained(eager, lambda tokens, target: loss_of(eager(tokens), target))
    model = tagger()
    cache = cached(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(model, lambda tokens, target: cache(tokens, target=target))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    plans = schedules_of(cache)
    assert len(plans) == 3
    assert len({plan.graph_hash for plan in plans}) == 3
    assert all(len(plan.steps) > len(plan.signatures) for plan in plans)


def test_the_cache_is_the_model_with_its_names() -> None:
    model = tagger()
    cache = cached(model)
    assert isinstance(cache, Tagger)
    assert list(cache.state_dict()) == list(model.state_dict())
    assert next(cache.parameters()) is next(model.parameters())
    tokens, target = batches()[0]
    cache.eval()
    assert not model.training
    assert torch.equal(cache(tokens), model(tokens))
    assert torch.equal(cache(tokens, target=target), loss_of(model(tokens), target))
    cache.train()
    with torch.no_grad():
        cache(tokens)
    assert remat.plans(cache) == []


def test_autocast_and_other_arguments_have_plans_of_their_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return (self.body(x) * scale).float().sum()

    torch.manual_seed(0)
    model = Scaled()
    cache = remat.rematerialize(model, budget="100%", solver="cut")
    x = torch.randn(64, 32)
    for scale in (1.0, 2.0, 1.0):
        assert torch.equal(cache(x, scale=scale), model(x, scale=scale))
    assert len(remat.plans(cache)) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cache(x, scale=1.0), model(x, scale=1.0))
    assert len(remat.plans(cache)) == 3


def test_of_more_plans_than_allowed_the_oldest_is_given_up_and_it_is_said() -> None:
    cache = cached(tagger(), max_plans=2)
    first, second, third = batches(1)
    for tokens, target in (first, second, first):
        cache(tokens, target=target)
    with pytest.warns(UserWarning, match="more than 2 signatures") as warned:
        cache(third[0], target=third[1])
    assert warned[0].filename == __file__
    shapes = ["[16, 24]", "[16, 32]"]
    for shape, plan in zip(shapes, schedules_of(cache), strict=True):
        assert any(shape in line for line in plan.inputs)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"budget": "8 gigs"}, BudgetError, "8 gigs"),
        ({"max_plans": 0}, SolverError, "max_plans must be 1 or more, not 0"),
        ({"max_plans": "2"}, SolverError, "max_plans must be 1 or more, not '2'"),
        ({"target": 1}, TypeError, "leave out target: without a batch"),
        ({"dynamic": True}, CaptureError, "dynamic=True is unknown"),
        ({"dynamic": {"tokens": 1}}, CaptureError, r"give .*: dynamic of 'tokens' is 1"),
        ({"dynamic": {"tokens": {-1: "n"}}}, CaptureError, "names dimension -1 of 'tokens'"),
        (
            {"dynamic": {"tokens": {1: 3}}},
            CaptureError,
            "give dynamic of tokens dimension 1 a name.* it is 3",
        ),
        ({"dynamic": {"x": {1: "n"}}}, CaptureError, "'x', which is not a tensor of the batch"),
        ({"upto": 5}, CaptureError, "upto=5 is not a dict"),
        ({"upto": {"n": 64}}, CaptureError, "upto names 'n' with 64"),
        (
            {"upto": {"tokens": {1: "n"}}},
            CaptureError,
            r"give the largest size.*dimension 1 is 'n'",
        ),
        ({"split": "yes"}, CaptureError, "give split='none', .*'yes' is unknown"),
        ({"check": "no"}, RewriteError, "give True, False, or None .*: check='no' is unknown"),
        ({"accumulate": 4}, RewriteError, "accumulate=4 is unknown"),
        ({"audit": "yes"}, RewriteError, "audit=.yes. is unknown"),
        ({"compile": "inductor"}, RewriteError, "compile='inductor' is unknown"),
        ({"sharding": "fsdp"}, RewriteError, r"give a remat\.Sharding"),
        ({"profile": 3}, RewriteError, r"give what remat\.profile returned"),
        ({"group": 2}, RewriteError, "group=2 is not a group of ranks"),
        ({"time_limit_s": "1"}, SolverError, "time_limit_s must be 0 or more"),
        ({"keep": 3}, SolverError, "keep=3 names no modules"),
        ({"loss_fn": 3}, CaptureError, "give loss_fn as a function .* it is a int"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        remat.rematerialize(tagger(), **{"budget": "60%", **options})


def test_a_form_of_dynamic_that_fits_no_batch_is_refused_before_a_trace() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(CaptureError, match=r"give sizes by argument.*: dynamic=True is unknown"):
        remat.rematerialize(tagger(), (tokens,), budget="60%", dynamic=True)  # type: ignore


def test_a_budget_that_nothing_fits_keeps_no_plan() -> None:
    cache = remat.rematerialize(tagger(), budget="1KiB", loss_fn=loss_of, solver="cut")
    tokens, target = batches()[0]
    with pytest.raises(BudgetError, match="below"):
        cache(tokens, target=target)
    assert remat.plans(cache) == []


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        pytest.param(copy.deepcopy, marks=pytest.mark.slow),
        pytest.param(read_again, marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_a_cache_makes_its_own_plans_and_trains_as_eager_does(copied: Any) -> None:
    cache = cached(tagger())
    tokens, target = batches()[0]
    cache(tokens, target=target).backward()
    other = copied(cache)
    assert remat.plans(other) == []
    eager = tagger()
    expected = trained(eager, lambda tokens, target: loss_of(eager(tokens), target))
    other.load_state_dict(tagger().state_dict())
    found = trained(other, lambda tokens, target: other(tokens, target=target))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(remat.plans(other)) == len(LENGTHS)


def test_a_cache_of_a_cache_is_one_of_the_original() -> None:
    model = tagger()
    cache = cached(model)
    tokens, target = batches()[0]
    cache(tokens, target=target)
    again = cached(cache)
    assert again.original_module is model
    assert remat.plans(again) == []
    assert torch.equal(again.eval()(tokens), model(tokens))


def test_a_last_batch_too_small_for_its_per_cent_takes_what_others_take() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(128, 128), nn.GELU())])
    fast = remat.rematerialize(model, budget="70%", solver="cut")
    with pytest.raises(BudgetError, match="is below"):
        fast(torch.randn(8, 128))
    for rows in (2048, 8):
        model.zero_grad()
        x = torch.randn(rows, 128)
        fast(x).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x).square().mean().backward()
        assert all(torch.equal(g, p.grad) for g, p in zip(found, model.parameters(), strict=True))
    assert len(remat.plans(fast)) == 2
    strict = remat.rematerialize(model, budget="1MiB", solver="cut")
    with pytest.raises(BudgetError, match="is below"):
        strict(torch.randn(2048, 128))


def test_plans_of_a_cache_have_copies_at_each_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path))
    torch.manual_seed(0)
    model = Stack()
    cache = remat.rematerialize(model, budget="85%", host="64MiB", check=False)
    for count in (64, 128, 64):
        x = torch.randn(count, WIDTH)
        assert same(step(cache, (x,)), step(model, (x,)))
    assert [plan.moves for plan in schedules_of(cache)] == [True, True]
    assert is_clean(tmp_path)


def gan_trained(planned: bool) -> list[Tensor]:
    """Losses and parameters after a few steps with a discriminator that is frozen in between."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))]
    parts += [
        nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    ]
    if planned:
        parts = [remat.rematerialize(part, budget="100%", time_limit_s=2) for part in parts]
    made, told = parts
    optimizers = [torch.optim.Adam(part.parameters(), 1e-2) for part in parts]
    losses: list[Tensor] = []
    for _ in range(3):
        told.requires_grad_(True)
        fake = made(torch.randn(12, 8)).detach()
        losses.append((told(torch.randn(12, 16)) - told(fake)).mean())
        losses[-1].backward()
        optimizers[1].step()
        told.requires_grad_(False)
        losses.append(told(made(torch.randn(12, 8))).mean())
        losses[-1].backward()
        optimizers[0].step()
        for part in parts:
            part.zero_grad()
    if planned:
        assert [len(remat.plans(part)) for part in parts] == [1, 2]
    return [*losses, *(p.detach() for part in parts for p in part.parameters())]


def test_a_gan_whose_discriminator_is_frozen_in_between_trains_as_eager_does() -> None:
    assert all(map(torch.equal, gan_trained(planned=True), gan_trained(planned=False)))


def test_a_frozen_model_that_has_no_backward_runs_its_own_forward_and_says_so_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).requires_grad_(False)
    fast, x = remat.rematerialize(model, budget="100%"), torch.ones(2, 4)
    with pytest.warns(UserWarning, match="Sequential runs without its plan"):
        assert torch.equal(fast(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fast(x).requires_grad
    assert not remat.plans(fast)
    fast(x.requires_grad_()).sum().backward()
    assert len(remat.plans(fast)) == 1
    assert x.grad is not None


def test_a_hook_on_the_model_runs_once_a_step() -> None:
    model, (tokens, _) = tagger(), batches()[0]
    eager = copy.deepcopy(model)
    for one in (model, eager):
        one.register_forward_hook(lambda _, __, output: 2 * output)
    fast = remat.rematerialize(model, budget="100%")
    for _ in range(2):
        torch.manual_seed(2)
        found = fast(tokens)
        torch.manual_seed(2)
        assert torch.equal(found, eager(tokens))
