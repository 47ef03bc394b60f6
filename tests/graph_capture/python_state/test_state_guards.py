"""Dictionaries are known to hold what they held, whatever is written to them and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.python_state import state_guards
from remat.graph_capture.python_state.state_guards import (
    CALLS_A_TREE,
    ObjectNames,
    PythonState,
    WatchedDicts,
    same_facts,
    unwritten,
    versions_tell,
)

Dicts = list[dict[str, Any]]


def watched(dicts: Dicts) -> WatchedDicts:
    names = ObjectNames()
    terms = [
        (
            one,
            [f"len({names(one)}) == {len(one)}"]
            + [f"{names(one)}[{key!r}] is {names(value)}" for key, value in one.items()],
        )
        for one in dicts
    ]
    return WatchedDicts(terms, names)


def dictionaries(number: int = 200) -> Dicts:
    return [{"a": object(), "b": object()} for _ in range(number)]


def test_this_python_tells_of_writes() -> None:
    assert versions_tell()


@pytest.mark.parametrize("which", [0, 63, 64, 199])
@pytest.mark.parametrize("tells", [True, False])
def test_another_object_is_seen_and_the_first_one_put_back_too(
    which: int, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_guards, "versions_tell", lambda: tells)
    dicts = dictionaries()
    test, before = watched(dicts), dicts[which]["a"]
    assert test.hold()
    for _ in range(3):
        dicts[which]["a"] = object()
        assert not test.hold()
        dicts[which]["a"] = before
        assert test.hold()
        assert test.hold()


@pytest.mark.parametrize(
    "change",
    [lambda one: one.update(c=1), lambda one: one.clear(), lambda one: one.setdefault("c")],
    ids=["more", "none", "default"],
)
def test_a_key_that_came_or_went_is_seen(change: Callable[[dict[str, Any]], Any]) -> None:
    dicts = dictionaries()
    test = watched(dicts)
    change(dicts[100])
    try:
        assert not test.hold()
    except KeyError:  # as of a name that is gone: whoever asks looks closely then
        assert not dicts[100]


def test_one_that_each_step_writes_to_makes_no_tree_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(dicts: Dicts) -> Callable[[], bool]:
        made.append(len(dicts))
        return unwritten(dicts)

    monkeypatch.setattr(state_guards, "unwritten", counted)
    dicts = dictionaries()
    test = watched(dicts)
    for _ in range(100):
        dicts[7]["a"], before = object(), dicts[7]["a"]
        dicts[7]["a"] = before
        assert test.hold()
    assert made == [200, 199]
    dicts[7]["a"] = object()
    assert not test.hold()


def test_those_that_are_written_to_now_and_then_make_few_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    monkeypatch.setattr(state_guards, "unwritten", lambda dicts: made.append(0) or unwritten(dicts))
    dicts = dictionaries()
    test, calls = watched(dicts), 10 * CALLS_A_TREE
    for call in range(calls):
        if call % 2:
            dicts[call % 200]["c"] = 1
            del dicts[call % 200]["c"]
        assert test.hold()
    assert len(made) <= 12


FACTS: dict[str, Callable[[Tensor], Any]] = {
    "frozen": lambda t: t.requires_grad_(False),
    "shape": lambda t: put_data(t, torch.ones(5, 4)),
    "strides": lambda t: put_data(t, torch.ones(4, 4).t()),
    "dtype": lambda t: put_data(t, torch.ones(4, 4, dtype=torch.float64)),
}


def put_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


@pytest.mark.parametrize("what", FACTS)
@pytest.mark.parametrize("which", [0, 70, 129])
def test_each_fact_of_each_tensor_is_seen(what: str, which: int) -> None:
    tensors = [nn.Parameter(torch.ones(4, 4)) for _ in range(130)]
    test = same_facts(tensors)
    with torch.no_grad():
        tensors[which].add_(1)
    assert test()
    FACTS[what](tensors[which])
    assert not test()


class Counted(nn.Module):
    """Its loss is left as an attribute by each step, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = 2.0
        self.extra: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        self.extra = hidden.square().mean()
        return self.last(hidden).sum()


def test_a_model_that_is_written_to_at_each_step_is_guarded_still() -> None:
    model, x = Counted(), torch.randn(3, 4)
    fast = remat.rematerialize(model, (x,), budget="100%", solver="store_all")
    for _ in range(5):
        fast(x).backward()
    model.eval()
    model.train()
    fast(x).backward()
    model.scale = 3.0
    with pytest.raises(remat.RematError, match="scale"):
        fast(x)
    model.scale = 2.0
    model.last.eval()
    with pytest.raises(remat.RematError, match="eval mode"):
        fast(x)


def test_what_changed_since_is_told_at_each_look() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.kept = 1.0, 1.0, [1.0]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.one * self.two * self.kept[0]

    model = Scaled()
    state = PythonState(model)

    def changed() -> dict[str, Any]:
        return {change.text: change.now for change in state.since().values()}

    for one in (2.0, 3.0, 4.0):
        model.one = one
        for _ in range(3):  # the first look may compile a test for what it finds
            assert changed() == {"one": one}
            change = state.first_change()
            assert change is not None
            assert change.now == one
        model.two = one
        assert changed() == {"one": one, "two": one}
        model.two = 1.0
        model.kept[0] = one
        assert changed() == {"one": one, "an item of kept": [one]}
        model.kept[0] = 1.0
    model.one = 1.0
    assert changed() == {}
    assert state.first_change() is None
