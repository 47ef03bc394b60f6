"""A family of schedules trains at all sizes of its range, to eager's bits, within the budget."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import (
    CaptureError,
    RematError,
    RewriteError,
    SignatureError,
    StateChangedError,
)
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.user_module.ranged import RangedModule
from tests.beside_eager import require_as_planned, same_bits
from tests.sized_models import SIZED, Sized, gpt

OF_SIZE = {"experts": "tokens", "lstm": "batch", "resnet": "batch", "u_net": "side"}
QUICK = "experts"
"""The model that is planned in a moment."""


def planned(name: str, budget: str = "60%", **options: Any) -> tuple[Sized, RangedModule]:
    torch.manual_seed(0)
    sized = SIZED[name]()
    batch = sized.batch(**sized.sizes[1])
    module = remat.rematerialize(
        sized.model, batch, budget=budget, dynamic=sized.dynamic, solver="cut", **options
    )
    return sized, module


@pytest.fixture(scope="module")
def experts() -> tuple[Sized, RangedModule]:
    """One plan for the tests that leave it as it is."""
    return planned(QUICK, "70%")


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OF_SIZE],
)
def test_it_trains_as_eager_at_eight_sizes_within_the_budget(name: str) -> None:
    sized, module = planned(name, "70%")
    (symbol,) = module.family.symbols
    last = len(symbol.sizes) - 1
    for i in range(8):
        sizes = {symbol.name: symbol.sizes[last * i // 7]}
        require_as_planned(sized.model, module, sized.batch(**sizes), **sizes)
    assert len(module.family.members) > 1


@pytest.mark.slow
def test_a_gpt_with_dropout_at_forty_random_sizes() -> None:
    sized, module = planned("gpt", "60%", check=False)
    assert len(module.family.members) > 2
    drawn = random.Random(0)
    for _ in range(40):
        sizes = {"batch": drawn.randint(2, 16), "seq": drawn.randint(16, 512)}
        require_as_planned(sized.model, module, sized.batch(**sizes), **sizes)


@pytest.mark.slow
def test_a_batch_of_one_has_a_range_of_its_own() -> None:
    sized = gpt()
    seq = {1: ("seq", 16, 512)}
    module = remat.rematerialize(
        sized.model, sized.batch(batch=1, seq=40), budget="60%",
        dynamic={"tokens": seq, "targets": seq}, solver="cut",
    )  # fmt: skip
    for length in (16, 63, 129, 400, 512):
        one = Sized(sized.model, lambda seq: sized.batch(batch=1, seq=seq), {}, [])
        require_as_planned(one.model, module, one.batch(seq=length), seq=length)


def test_code_is_made_when_a_size_first_needs_it_and_then_kept() -> None:
    sized, module = planned(QUICK)
    members = type(module)._remat_members
    assert sum(one is not None for one in members._modules) == 1
    low, high = sized.batch(tokens=5), sized.batch(tokens=300)
    for _ in range(2):
        module(*low), module(*high)
        assert sum(one is not None for one in members._modules) == 2
    assert module.family.number_at(tokens=5) == 0
    assert module.family.number_at(tokens=300) == len(module.family.members) - 1


def test_a_model_that_has_changed_is_refused_before_more_code_is_made() -> None:
    sized, module = planned(QUICK)
    sized.model.experts[1].eval()
    for tokens in (5, 300):
        with pytest.raises(StateChangedError, match=r"experts.1.* in training mode"):
            module(*sized.batch(tokens=tokens))
    sized.model.experts[1].train()
    assert same_bits(sized.model, module, sized.batch(tokens=300))


def test_backwards_of_two_members_may_be_open_at_once(
    experts: tuple[Sized, RangedModule],
) -> None:
    sized, module = experts
    batches = [sized.batch(tokens=5), sized.batch(tokens=300)]
    parameters = [*sized.model.parameters()]
    wanted = [torch.autograd.grad(sized.model(*x), parameters) for x in batches]
    losses = [module(*x) for x in batches]
    found = [torch.autograd.grad(loss, parameters) for loss in reversed(losses)]
    for one, other in zip(wanted, reversed(found), strict=True):
        assert all(map(torch.equal, one, other))


def test_other_batches_are_refused_before_anything_runs(
    experts: tuple[Sized, RangedModule],
) -> None:
    sized, module = experts
    for tokens in (1, 3, 301):
        with pytest.raises(SignatureError, match="planned for tokens from 4 to 300"):
            module(*sized.batch(tokens=tokens))
    with pytest.raises(SignatureError, match="float64"):
        module(sized.batch(tokens=8)[0].double())
    with pytest.raises(SignatureError, match=r"something else now|arguments"):
        module(3)
    with pytest.raises(SignatureError, match="arguments"):
        module(*sized.batch(tokens=8), *sized.batch(tokens=8))


def test_it_is_the_model_with_its_names_and_its_own_forward_outside_of_training(
    experts: tuple[Sized, RangedModule],
) -> None:
    sized, module = experts
    assert isinstance(module, type(sized.model))
    assert list(module.state_dict()) == list(sized.model.state_dict())
    x = sized.batch(tokens=1)
    module.eval()
    assert torch.equal(module(*x), sized.model(*x))
    module.train()
    with torch.no_grad():
        assert torch.equal(module(*x), sized.model(*x))


@pytest.mark.slow
def test_copies_and_pickles_are_families_over_their_own_model(
    experts: tuple[Sized, RangedModule],
) -> None:
    sized, module = experts
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.family == module.family
        assert next(other.parameters()) is not next(module.parameters())
        for tokens in (9, 290):
            x = sized.batch(tokens=tokens)
            assert torch.equal(other(*x), sized.model(*x))


def test_a_loss_with_its_target_is_part_of_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    rows = {0: ("rows", 2, 200)}
    module = remat.rematerialize(
        model, (torch.randn(9, 8),), budget="100%", loss_fn=nn.functional.cross_entropy,
        target=torch.randint(4, (9,)), dynamic={0: rows, "target": rows}, solver="cut",
    )  # fmt: skip
    for n in (2, 7, 200):
        x, y = torch.randn(n, 8), torch.randint(4, (n,))
        assert torch.equal(module(x, target=y), nn.functional.cross_entropy(model(x), y))
        assert not remat.check(
            model, module, (x,), loss_fn=nn.functional.cross_entropy, target=y, steps=1
        ).differences
    with pytest.raises(RewriteError, match="takes a target"):
        module(torch.randn(9, 8))


def test_options_that_a_range_does_not_take_are_named() -> None:
    with pytest.raises(RematError, match="cuda_graphs is not taken with dynamic sizes"):
        planned(QUICK, cuda_graphs=True)


def test_a_family_of_another_model_is_refused_and_no_module_is_planned_twice(
    experts: tuple[Sized, RangedModule],
) -> None:
    _, module = experts
    with pytest.raises(RewriteError, match="was not captured in this process for the range"):
        agreed_rewrite(gpt().model, module.family)
    with pytest.raises(CaptureError, match="already follows a plan"):
        agreed_rewrite(module, module.family)


def test_the_peak_of_a_batch_at_hand_is_checked_and_other_sizes_may_be_given() -> None:
    sized = SIZED[QUICK]()
    far: tuple[Tensor, ...] = sized.batch(tokens=900)
    module = remat.rematerialize(
        sized.model, far, budget="80%", dynamic=sized.dynamic, solver="cut"
    )
    assert same_bits(sized.model, module, sized.batch(tokens=77))
