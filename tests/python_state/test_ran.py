"""Guards compare what code that ran can read: less than all code could, and no value too few."""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, ClassVar, TypedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat.graph_capture.errors import StateChangedError
from remat.graph_capture.python_state.ran import CodeThatRan
from remat.graph_capture.python_state.watch import PythonState
from remat.graph_capture.tracing.trace import trace
from tests.python_state.kinds import KINDS
from tests.python_state.moments import X, beside_eager, planned
from tests.python_state.places import PLACES, Place, Reader


class Holder:
    """What models below read `value` of, in one way or another."""

    def __init__(self, value: float) -> None:
        self.value = value

    def method(self) -> float:
        return self.value

    @property
    def computed(self) -> float:
        return self.value

    def __getattr__(self, name: str) -> float:
        if name == "asked":
            return self.value
        raise AttributeError(name)

    def __len__(self) -> int:
        return int(self.value)

    def __getitem__(self, index: int) -> float:
        return self.value + index

    def __iter__(self) -> Iterator[float]:
        yield self.value

    def __lt__(self, other: Holder) -> bool:
        return self.value < other.value


class Scaled(torch.autograd.Function):
    """Reads a value in backward alone."""

    held: ClassVar[Holder]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * Scaled.held.method()


def with_a_hook(held: Holder, x: Tensor) -> Tensor:
    y = x * 1.0
    y.register_hook(lambda grad: grad * held.method())
    return y


def with_a_hook_of_a_node(held: Holder, x: Tensor) -> Tensor:
    y = x * 1.0
    node: Any = y.grad_fn
    node.register_hook(lambda grads, _: (grads[0] * held.method(), *grads[1:]))
    return y


def in_backward(held: Holder, x: Tensor) -> Any:
    Scaled.held = held
    return Scaled.apply(x)


def recomputed(held: Holder, x: Tensor) -> Tensor:
    return checkpoint(lambda y: y * held.method(), x, use_reentrant=False)


def sorted_by(held: Holder) -> float:
    return sorted([Holder(1.5), held])[0].method()


READ: dict[str, Callable[[Holder, Tensor], Tensor]] = {
    "partial": lambda it, x: x * functools.partial(Holder.method, it)(),
    "map": lambda it, x: x * sum(map(Holder.method, [it, it])),
    "key of sorted": lambda it, x: x * sorted([it], key=Holder.method)[0].value,
    "compared by sorted": lambda it, x: x * sorted_by(it),
    "attrgetter": lambda it, x: x * operator.attrgetter("computed")(it),
    "methodcaller": lambda it, x: x * operator.methodcaller("method")(it),
    "property": lambda it, x: x * it.computed,
    "getattr of a class": lambda it, x: x * it.asked,
    "length": lambda it, x: x * len(it),
    "items": lambda it, x: x * it[1],
    "iteration": lambda it, x: x * sum(it),
    "comprehension": lambda it, x: x * max([one.method() for one in [it]]),
    "generator": lambda it, x: x * sum(one.method() for one in [it]),
    "a custom backward": in_backward,
    "a hook of a tensor": with_a_hook,
    "a hook of a node": with_a_hook_of_a_node,
    "checkpoint": recomputed,
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[Holder, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held, self.read = Holder(2.0), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.held, self.linear(x)).square()


def is_refused_for(name: str, place: Place, fast: nn.Module) -> bool:
    said = beside_eager(place, fast)
    return said.startswith("refused: StateChangedError: ") and f"{name} of " in said


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_through_c_or_in_backward_is_guarded(kind: str) -> None:
    model = Reading(READ[kind])
    place = Place(model, lambda _: None)
    fast = planned(place)
    assert beside_eager(place, fast) == "exact"
    model.held.value = 1.0
    assert is_refused_for("held.value", place, fast)
    model.held.value = 2.0
    assert beside_eager(place, fast) == "exact"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", PLACES)
def test_a_change_is_noticed_wherever_code_that_ran_reads_it(where: str, kind: str) -> None:
    before, after = KINDS[kind]()
    place = PLACES[where][0](before)
    state, ran = PythonState(place.model, place.loss_fn), CodeThatRan()
    with ran.recorded():
        output = place.model(X)
        _ = place.loss_fn(output) if place.loss_fn else None
    state.compare_what_ran(ran)
    assert state.first_change() is None
    place.put(after)
    assert state.first_change() is not None


class Two(Reader):
    """Reads one of two values, as a third one says."""

    def __init__(self) -> None:
        super().__init__()
        self.takes_other, self.used, self.other = False, 1.0, 1.0

    def read(self) -> Any:
        return self.by_other() if self.takes_other else self.by_used()

    def by_used(self) -> float:
        return self.used

    def by_other(self) -> float:
        return self.other


def test_code_that_did_not_run_is_not_compared_until_a_branch_is_another_one() -> None:
    model = Two()
    place = Place(model, lambda _: None)
    fast = planned(place)
    model.other = 2.0
    assert beside_eager(place, fast) == "exact"
    model.takes_other = True
    assert is_refused_for("takes_other", place, fast)


def test_code_of_the_second_call_alone_is_compared() -> None:
    class First(Two):
        def read(self) -> Any:
            if self.takes_other:
                return self.by_other()
            self.takes_other = True
            return self.by_used()

    model = First()
    fast = planned(Place(model, lambda _: None))
    fast(X)
    fast(X)
    model.other = 2.0
    with pytest.raises(StateChangedError, match="other of First was"):
        fast(X)


def test_an_attribute_that_a_text_names_is_compared() -> None:
    class Named(Reader):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.scale = name, 1.0

        def read(self) -> Any:
            return getattr(self, self.name)

    model = Named("scale")
    place = Place(model, lambda _: None)
    fast = planned(place)
    model.scale = 2.0
    assert is_refused_for("scale", place, fast)


def test_code_behind_a_cache_that_was_filled_before_counts() -> None:
    class Table:
        def __init__(self) -> None:
            self.factor = 1.0

        def built(self) -> float:
            return self.factor

    table = Table()

    @functools.cache
    def cached(size: int) -> float:
        return table.built() * size

    class Cached(Reader):
        def read(self) -> Any:
            return cached(2)

    model = Cached()
    model(X)
    fast = planned(Place(model, lambda _: None))
    table.factor = 3.0
    cached.cache_clear()
    with pytest.raises(StateChangedError, match="factor"):
        fast(X)


def test_an_attribute_of_a_function_that_is_not_called_is_compared() -> None:
    def settings() -> None: ...

    settings.factor = 1.0  # type: ignore[attr-defined]

    class Reads(Reader):
        def read(self) -> Any:
            return settings.factor  # type: ignore[attr-defined]

    place = Place(Reads(), lambda _: None)
    fast = planned(place)
    settings.factor = 2.0  # type: ignore[attr-defined]
    assert is_refused_for("settings.factor", place, fast)


@pytest.mark.parametrize("by", ["a new thread", "a pool"])
def test_code_that_another_thread_runs_is_compared(by: str) -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()

    class Elsewhere(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def compute(self, results: list[float]) -> None:
            results.append(self.factor)

        def read(self) -> Any:
            results: list[float] = []
            if by == "a pool":
                pool.submit(self.compute, results).result()
            else:
                thread = threading.Thread(target=self.compute, args=(results,))
                thread.start()
                thread.join()
            return results[0]

    place = Place(Elsewhere(), lambda _: None)
    fast = planned(place)
    place.model.factor = 2.0
    assert is_refused_for("factor", place, fast)


def test_a_debugger_goes_on_and_all_code_is_compared() -> None:
    seen = list[str]()

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_name == "by_used":
            seen.append(event)
        return follow

    model = Two()
    before = sys.gettrace()
    sys.settrace(follow)
    try:
        done = trace(model, (X,))
        assert sys.gettrace() is follow
    finally:
        sys.settrace(before)
    assert {"call", "line", "return"} <= set(seen)
    model.other = 2.0
    assert done.python_state.first_change() is not None


def test_code_that_sets_a_tracer_keeps_it_and_all_code_is_compared() -> None:
    class Tracing(Two):
        def read(self) -> Any:
            sys.settrace(None)
            return super().read()

    model = Tracing()
    before = sys.gettrace()
    try:
        done = trace(model, (X,))
    finally:
        sys.settrace(before)
    model.other = 2.0
    assert done.python_state.first_change() is not None


def test_no_tracer_is_left_where_a_capture_fails() -> None:
    class Failing(Reader):
        def read(self) -> Any:
            raise ValueError

    before = sys.gettrace()
    with pytest.raises(Exception, match="ValueError"):
        trace(Failing(), (X,))
    assert sys.gettrace() is before


def test_a_walk_takes_classes_that_answer_no_questions_and_properties_over_slots() -> None:
    class Row(TypedDict):
        name: str

    class Slotted:
        __slots__ = ("value",)

    class Computed(Slotted):
        @property
        def value(self) -> list[int]:  # a new one each time
            return [1]

    class Reads(Reader):
        def read(self) -> Any:
            return Row(name="x"), self.held.value

    model = Reads()
    model.held = Computed()
    state = PythonState(model)
    assert state.first_change() is None
    state.restore()
