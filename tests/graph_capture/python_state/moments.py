"""When a value changes. Each function trains a planned model beside its original, and judges.

What comes of a change is ``exact``, ``planned anew``, or ``refused`` with what is said. Anything
else is wrong. In a `House` all places are read by one model, so that one plan serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import RematError
from remat.ranks.same_order import agreed_rewrite
from tests.graph_capture.python_state.kinds import KINDS
from tests.graph_capture.python_state.places import PLACES, WIDTH, Place

Change = Callable[[], Any]
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {
    "budget": "100%", "solver": "store_all", "recompute": "*", "check": False,
}  # fmt: skip
"""Backward makes all again that it can, and so reads values too."""


class _Rooms(nn.Module):
    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.rooms = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        for room in self.rooms:
            x = x + room(x)
        return x


class House:
    """All places in one model and loss, each with a value of another kind."""

    def __init__(self, shift: int) -> None:
        self.rooms: dict[str, tuple[Place, Any, Any]] = {}
        kinds = list(KINDS.values())
        for i, (where, (make, _)) in enumerate(PLACES.items()):
            before, after = kinds[(i + shift) % len(kinds)]()
            self.rooms[where] = make(before), before, after
        losses = [place.loss_fn for place, _, _ in self.rooms.values() if place.loss_fn]

        def loss_fn(output: Tensor) -> Tensor:
            return sum(loss(output) for loss in losses)  # type: ignore[return-value]

        models = [place.model for place, _, _ in self.rooms.values()]
        self.place = Place(_Rooms(models), lambda _: None, loss_fn)

    def changes(self) -> Iterator[tuple[str, Change, Change]]:
        """Each place's name, with what changes its value and what puts it back."""
        for where, (place, before, after) in self.rooms.items():
            yield where, lambda p=place, v=after: p.put(v), lambda p=place, v=before: p.put(v)


def planned(place: Place) -> Any:
    return remat.rematerialize(place.model, (X,), loss_fn=place.loss_fn, **OPTIONS)


def step(module: nn.Module, place: Place, between: Change | None = None) -> list[Tensor] | str:
    """Output and gradients of a step; or what was said, where it was refused."""
    place.model.zero_grad(set_to_none=True)
    try:
        output = module(X)
        if module is place.model and place.loss_fn is not None:
            output = place.loss_fn(output)
        if between:
            between()
        output.sum().backward()
    except (RematError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return [output.detach(), *(p.grad for p in place.model.parameters() if p.grad is not None)]


def judged(expected: list[Tensor] | str, found: list[Tensor] | str) -> str:
    if isinstance(found, str):
        return f"refused: {found}"
    if isinstance(expected, str):
        return f"wrong: eager says {expected}"
    same = len(expected) == len(found) and all(map(torch.equal, expected, found))
    return "exact" if same else "wrong: other bits"


def beside_eager(place: Place, fast: nn.Module, between: Change | None = None) -> str:
    return judged(step(place.model, place, between), step(fast, place, between))


def is_refused_for(name: str, place: Place, fast: nn.Module) -> bool:
    said = beside_eager(place, fast)
    return said.startswith("refused: StateChangedError: ") and f"{name} of " in said


def before_backward(place: Place, fast: nn.Module, change: Change, undo: Change) -> str:
    expected = step(place.model, place, change)
    undo()
    found = step(fast, place, change)
    undo()
    return judged(expected, found)


def of_a_cache(place: Place, change: Change) -> str:
    fast = remat.rematerialize(place.model, loss_fn=place.loss_fn, **OPTIONS)
    if (before := beside_eager(place, fast)) != "exact":
        return f"wrong before: {before}"
    change()
    after = beside_eager(place, fast)
    return "planned anew" if after == "exact" and len(remat.plans(fast)) == 2 else after


def before_rewriting(place: Place, change: Change) -> str:
    graph = remat.capture(place.model, (X,), loss_fn=place.loss_fn)
    schedule = remat.solve(graph, "100%", "store_all", recompute="*").schedule
    assert schedule is not None
    change()
    try:
        fast = agreed_rewrite(place.model, schedule)
    except RematError as error:
        return f"refused: {type(error).__name__}: {error}"
    return beside_eager(place, fast)


class Changing(nn.Module):
    """Runs a model, and then changes a value."""

    def __init__(self, model: nn.Module, change: Change) -> None:
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x: Tensor) -> Tensor:
        y = self.model(x)
        self.change()
        return y


def inside_forward(place: Place, change: Change, undo: Change) -> str:
    own = Place(Changing(place.model, change), place.put, place.loss_fn)
    try:
        fast = planned(own)
    except RematError as error:
        return f"refused: {type(error).__name__}: {error}"
    expected = [step(own.model, own), step(own.model, own)]
    undo()
    said = [judged(one, step(fast, own)) for one in expected]
    return next((one for one in said if one != "exact"), "exact")
