"""Guards compare what code that ran can read: less than all code could, and no value too few."""

from __future__ import annotations

import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypedDict

import pytest
import torch

from remat.graph_capture.errors import StateChangedError
from remat.graph_capture.python_state import state_walk
from remat.graph_capture.python_state.executed_code import ExecutedCode
from remat.graph_capture.python_state.state_guards import PythonState
from remat.graph_capture.tracing.trace import trace
from tests.graph_capture.python_state.kinds import KINDS
from tests.graph_capture.python_state.moments import X, beside_eager, is_refused_for, planned
from tests.graph_capture.python_state.places import PLACES, Place, Reader
from tests.rows import each_nth


@pytest.mark.parametrize("kind", each_nth(3, KINDS))
@pytest.mark.parametrize("where", PLACES)
def test_a_change_is_noticed_wherever_code_that_ran_reads_it(where: str, kind: str) -> None:
    before, after = KINDS[kind]()
    place = PLACES[where][0](before)
    ran = ExecutedCode()
    state = PythonState(place.model, place.loss_fn, ran)
    with ran.told_to(state.begins), ran.recorded():
        output = place.model(X)
        _ = place.loss_fn(output) if place.loss_fn else None
    state.compare_executed()
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


def peer(name: str, namespace: dict[str, Any]) -> None:
    """A class whose method `read` reaches the method of the next one, and a value for each."""
    code = (
        f"class {name}:\n    def read(self):\n        return peers['{name}'].read() + value_{name}"
    )
    exec(code, namespace)


def test_what_a_library_names_and_never_runs_costs_nothing() -> None:
    namespace: dict[str, Any] = {"__name__": "a_large_library", "peers": {}}
    for i in range(300):
        peer(f"P{i}", namespace)
        namespace[f"value_P{i}"] = 1.0
    namespace["peers"] |= {f"P{i}": namespace[f"P{i + 1}"]() for i in range(299)}

    class Names(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.is_far, self.first = False, namespace["P0"]()

        def read(self) -> Any:
            return self.first.read() if self.is_far else 1.0

    model = Names()
    every = PythonState(model)
    assert every._found.functions >= 300
    assert len(every.places) >= 600
    traced = trace(model, (X,)).python_state
    assert traced._found.functions < 10
    assert len(traced.places) < 50


def test_a_walk_ends_at_its_bound_with_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chain:
        def __init__(self, depth: int) -> None:
            self.value, self.next = 1.0, Chain(depth - 1) if depth else None

    class Reads(Reader):
        def read(self) -> Any:
            return self.held.value if self.held.next else self.held.next.value

    model = Reads()
    model.held = Chain(400)
    monkeypatch.setattr(state_walk, "MOST_PLACES", 100)
    state = PythonState(model)
    assert len(state.places) < 120
    model.held.value = 2.0
    assert state.first_change() is not None


@pytest.mark.zoo
def test_adapters_of_peft_add_little_to_what_is_walked() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    places = len(trace(model, (), batch).python_state.places)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with_adapters = len(trace(adapted.train(), (), batch).python_state.places)
    assert places < 3000
    assert with_adapters < 1.5 * places
