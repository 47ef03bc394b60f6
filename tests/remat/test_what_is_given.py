"""What is given in a wrong form, or under a wrong name, is refused at once, in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import remat
from remat.graph_capture.errors import (
    BudgetError,
    CaptureError,
    RematError,
    RewriteError,
    SolverError,
)
from remat.ranks.same_order import agreed_load, agreed_rewrite

X = torch.randn(4, 8)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), 0.1)


def graph() -> Any:
    return remat.capture(model(), (X,))


ENTRIES: dict[str, Callable[..., Any]] = {
    "capture": lambda *given, **named: remat.capture(model(), *given, **named),
    "rematerialize": lambda *given, **named: remat.rematerialize(
        model(), *given, budget="min", **named
    ),
    "blocks": lambda *given, **named: remat.rematerialize(
        model(), *given, blocks="*", budget="min", **named
    ),
    "update in backward": lambda *given, **named: remat.rematerialize(
        model(), *given, optimizer_in_backward=sgd(), budget="min", **named
    ),
}
FORMS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a tensor": ((X,), {}, r"give args as a tuple .* such as \(x,\): it is a Tensor"),
    "names": (({"input": X},), {}, "by name as kwargs=.*args is a dict"),
    "kwargs": (((), (X,)), {}, "give kwargs as a dict .*it is a tuple"),
    "a loss's name": (((X,),), {"loss_fn": "mse"}, "give loss_fn as a function .*it is a str"),
    "a loss's class": (
        ((X,),),
        {"loss_fn": nn.MSELoss},
        r"give MSELoss\(\): loss_fn is the class MSELoss",
    ),
    "a target alone": (((X,),), {"target": X}, "give loss_fn too, or leave out target"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_batch_or_a_loss_that_is_none_is_refused(entry: str, form: str) -> None:
    given, named, said = FORMS[form]
    with pytest.raises(CaptureError, match=said) as told:
        ENTRIES[entry](*given, **named)
    assert "\n" not in str(told.value)


PLANS: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(ENTRIES[name], (X,)) for name in ENTRIES if name != "capture"},
    "no batch": lambda **named: remat.rematerialize(model(), budget="min", **named),
    "rewrite": lambda **named: agreed_rewrite(model(), graph(), (X,), **named),
    "load": lambda **named: agreed_load("no such file", model(), **named),
}


@pytest.mark.parametrize("entry", PLANS)
def test_audits_are_on_or_off(entry: str) -> None:
    with pytest.raises(RewriteError, match=r"^give True or False: audit='yes' is unknown$"):
        PLANS[entry](audit="yes")


@pytest.mark.parametrize("entry", ["rewrite", "load"])
def test_so_is_code_by_inductor(entry: str) -> None:
    with pytest.raises(RewriteError, match=r"^give True or False: compile='max' is unknown$"):
        PLANS[entry](compile="max")


WRONG: dict[str, tuple[Callable[[], Any], type[RematError], str]] = {
    "blocks in a list": (
        lambda: remat.rematerialize(model(), (X,), blocks=["0"], budget="min"),  # type: ignore[arg-type]
        CaptureError, "give a glob, blocks='layers.*'.*blocks is a list",
    ),
    "a batch in place of the blocks": (
        lambda: remat.rematerialize(model(), blocks=(X,), budget="min"),  # type: ignore[arg-type]
        CaptureError, r"pass args, as in remat\.rematerialize\(.*blocks are planned with a batch",
    ),
    "seconds as a text": (
        lambda: remat.solve(graph(), "60%", time_limit_s="5"),  # type: ignore[call-overload]
        SolverError, "time_limit_s must be 0 or more, and finite, not '5'",
    ),
    "seconds below zero": (
        lambda: remat.rematerialize(model(), (X,), budget="min", time_limit_s=-1),
        SolverError, "time_limit_s must be 0 or more",
    ),
    "seconds of blocks": (
        lambda: remat.rematerialize(model(), (X,), blocks="*", budget="min", time_limit_s=-1),
        SolverError, "time_limit_s must be 0 or more",
    ),
    "a solver's number": (
        lambda: remat.solve(graph(), "60%", 3),  # type: ignore[call-overload]
        SolverError, "name a solver with a string such as 'auto', not 3",
    ),
    "one budget to sweep": (
        lambda: remat.sweep(graph(), "60%"),  # type: ignore[call-overload]
        BudgetError, r"budgets is one string: give a list, such as \['60%'\]",
    ),
    "a cache of no module": (
        lambda: remat.rematerialize("model", budget="60%"),  # type: ignore[arg-type]
        CaptureError, "captured from a torch.nn.Module, and this is str",
    ),
    "a cache with an optimizer": (
        lambda: remat.rematerialize(model(), budget="60%", optimizer=sgd()),
        CaptureError, "give the optimizer by name, not as a SGD: choose one of none, sgd",
    ),
    "a cache with an unknown optimizer": (
        lambda: remat.rematerialize(model(), budget="60%", optimizer="lion"),
        CaptureError, "unknown optimizer 'lion': choose one of none, sgd, momentum, adamw",
    ),
    "a cache with an unknown option": (
        lambda: remat.rematerialize(model(), budget="60%", optimzer="adamw"),
        SolverError, "has no option 'optimzer'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_such_thing_is_refused_where_it_is_given(what: str) -> None:
    act, kind, said = WRONG[what]
    with pytest.raises(kind, match=said) as told:
        act()
    assert "\n" not in str(told.value)


def test_lists_mappings_and_losses_that_can_be_called_are_taken() -> None:
    class Called:
        def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return mse_loss(output, target)

    for loss_fn in (mse_loss, nn.MSELoss(), Called()):
        assert remat.capture(model(), [X], loss_fn=loss_fn, target=X).ops  # type: ignore[arg-type]
    assert remat.capture(model(), kwargs={"input": X}).ops
    cache = remat.rematerialize(
        model(), budget="100%", optimizer="adamw", order="fixed", solver="cut"
    )
    cache(X).sum().backward()


class Masked(nn.Module):
    """Takes a second argument that need not be given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(x)
        return y if mask is None else y * mask


CALLS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a target among the arguments": (
        model, {"args": (X, X), "loss_fn": mse_loss},
        r"^give the loss's target as target, not in args: args=\(x,\), target=y",
    ),
    "a target as an optional argument": (
        Masked, {"args": (X, X), "loss_fn": mse_loss}, "missing .*'target'. Give target",
    ),
    "a loss module without its target": (
        model, {"args": (X,), "loss_fn": nn.MSELoss()}, "loss_fn MSELoss is called .*Give target",
    ),
    "a target that the loss does not take": (
        model, {"args": (X,), "loss_fn": lambda out: out.sum(),
                "target": X}, "or leave out target",
    ),
    "too many": (model, {"args": (X, X)}, "Leave the others out; give what the loss takes"),
    "an unknown name": (
        model, {"args": (X,), "kwargs": {"mask": X}}, "unexpected keyword argument 'mask'. Give",
    ),
    "too few": (
        model, {"args": ()}, "missing a required argument: 'input'. Give what it takes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("entry", ["capture", "rematerialize"])
@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_forward_or_the_loss_cannot_take_says_what_to_give(
    kind: str, entry: str
) -> None:
    made, given, text = CALLS[kind]
    budget = {"budget": "min"} if entry == "rematerialize" else {}
    with pytest.raises(CaptureError, match=text):
        getattr(remat, entry)(made(), **given, **budget)


def test_a_cache_that_is_called_with_the_target_says_how() -> None:
    cache = remat.rematerialize(model(), budget="min", loss_fn=mse_loss)
    with pytest.raises(CaptureError, match=r"model\(x, target=y\) at each step"):
        cache(X, X)
