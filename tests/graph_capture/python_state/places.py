"""Where code reads a value from: a model or a loss for each place, and how to set the value."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.graph_capture.python_state.kinds import factor_of

WIDTH = 4
FACTOR: Any = 1.0
"""A global that `in_a_global` reads."""
BY_TEXT: Any = 1.0
"""Another, of `in_globals_by_a_text`."""
there = types.ModuleType("tests_module_of_settings")
sys.modules[there.__name__] = there
there.FACTOR = 1.0  # type: ignore[attr-defined]


class Place(NamedTuple):
    """A model that reads a value, and how to set it."""

    model: nn.Module
    put: Callable[[Any], None]
    loss_fn: Callable[..., Any] | None = None


class Reader(nn.Module):
    """A base of the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def read(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * factor_of(self.read()))


class Asking(Reader):
    """Reads what a function makes of what it holds."""

    def __init__(self, held: Any, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.ask = held, ask

    def read(self) -> Any:
        return self.ask(self.held)


def in_an_attribute(value: Any) -> Place:
    class Attribute(Reader):
        def read(self) -> Any:
            return self.value

    model = Attribute()
    model.value = value
    return Place(model, lambda new: setattr(model, "value", new))


def in_a_config(value: Any) -> Place:
    class Config(Reader):
        def read(self) -> Any:
            return self.config.inner.value

    model = Config()
    model.config = types.SimpleNamespace(inner=_Settings())
    model.config.inner.value = value
    return Place(model, lambda new: setattr(model.config.inner, "value", new))


class _Settings:
    value: Any


def in_a_list(value: Any) -> Place:
    class Listed(Reader):
        def read(self) -> Any:
            return self.values[1]

    model = Listed()
    model.values = [None, value]
    return Place(model, lambda new: model.values.__setitem__(1, new))


def in_a_dictionary(value: Any) -> Place:
    class Mapped(Reader):
        def read(self) -> Any:
            return self.values["it"]

    model = Mapped()
    model.values = {"it": value}
    return Place(model, lambda new: model.values.update(it=new))


def in_a_closure(value: Any) -> Place:
    held = value

    class Closed(Reader):
        def read(self) -> Any:
            return held

    def put(new: Any) -> None:
        nonlocal held
        held = new

    return Place(Closed(), put)


def in_a_global(value: Any) -> Place:
    class Global(Reader):
        def read(self) -> Any:
            return FACTOR

    def put(new: Any) -> None:
        globals()["FACTOR"] = new

    put(value)
    return Place(Global(), put)


def in_another_module(value: Any) -> Place:
    class Elsewhere(Reader):
        def read(self) -> Any:
            return there.FACTOR  # type: ignore[attr-defined]

    there.FACTOR = value  # type: ignore[attr-defined]
    return Place(Elsewhere(), lambda new: setattr(there, "FACTOR", new))


def in_a_class(value: Any) -> Place:
    class OfClass(Reader):
        def read(self) -> Any:
            return type(self).shared

    OfClass.shared = value
    return Place(OfClass(), lambda new: setattr(OfClass, "shared", new))


def over_a_class(value: Any) -> Place:
    """An instance's own value hides that of its class."""

    class Hidden(Reader):
        def read(self) -> Any:
            return self.shared

    Hidden.shared = staticmethod(value) if isinstance(value, types.FunctionType) else value
    model = Hidden()

    def put(new: Any) -> None:
        vars(model).pop("shared", None)
        if new is not value:
            model.shared = new

    return Place(model, put)


def in_a_property(value: Any) -> Place:
    class Computed(Reader):
        def read(self) -> Any:
            return self.computed

        @property
        def computed(self) -> Any:
            return self.hidden

    model = Computed()
    model.hidden = value
    return Place(model, lambda new: setattr(model, "hidden", new))


def in_a_default(value: Any) -> Place:
    class Defaulted(Reader):
        def read(self) -> Any:
            return self.given()

        def given(self, factor: Any = value) -> Any:
            return factor

    def put(new: Any) -> None:
        Defaulted.given.__defaults__ = (new,)

    return Place(Defaulted(), put)


def in_a_partial(value: Any) -> Place:
    held = {"it": value}

    def read(source: dict[str, Any]) -> Any:
        return source["it"]

    class Partial(Reader):
        def read(self) -> Any:
            return self.bound()

    model = Partial()
    model.bound = functools.partial(read, held)
    return Place(model, lambda new: held.update(it=new))


def by_a_name_in_text(value: Any) -> Place:
    class ByName(Reader):
        def read(self) -> Any:
            return getattr(self, "by_name")  # noqa: B009

    model = ByName()
    model.by_name = value
    return Place(model, lambda new: setattr(model, "by_name", new))


def through_an_unknown_attribute(value: Any) -> Place:
    """A wrapper that asks what it wraps, as those of configs do."""

    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Wrapped(Reader):
        def read(self) -> Any:
            return self.config.wrapped_value

    model = Wrapped()
    model.config = Wrapper(_Settings())
    model.config.inner.wrapped_value = value
    return Place(model, lambda new: setattr(model.config.inner, "wrapped_value", new))


def deep_in_lists(value: Any) -> Place:
    class Deep(Reader):
        def read(self) -> Any:
            return self.layers[0]["scale"][0]

    model = Deep()
    model.layers = [{"scale": [value]}]
    return Place(model, lambda new: model.layers[0]["scale"].__setitem__(0, new))


def in_a_submodule(value: Any) -> Place:
    class Child(nn.Module):
        def forward(self) -> Any:
            return self.value

    class Parent(Reader):
        def read(self) -> Any:
            return self.child()

    model = Parent()
    model.child = Child()
    model.child.value = value
    return Place(model, lambda new: setattr(model.child, "value", new))


def in_a_function(value: Any) -> Place:
    """An attribute of a function, which is one way to keep something between calls."""

    def given() -> Any:
        return given.held  # type: ignore[attr-defined]

    class OfFunction(Reader):
        def read(self) -> Any:
            return given()

    given.held = value  # type: ignore[attr-defined]
    return Place(OfFunction(), lambda new: setattr(given, "held", new))


def in_the_owner_of_a_method(value: Any) -> Place:
    class Owner:
        def method(self) -> Any:
            return self.owned

    class Bound(Reader):
        def read(self) -> Any:
            return self.asked()

    owner, model = Owner(), Bound()
    owner.owned = value
    model.asked = owner.method
    return Place(model, lambda new: setattr(owner, "owned", new))


def in_a_dictionary_of_a_class(value: Any) -> Place:
    class Base(Reader):
        table: dict[str, Any] = {}  # noqa: RUF012

    class Derived(Base):
        def read(self) -> Any:
            return self.table["it"]

    Base.table = {"it": value}
    return Place(Derived(), lambda new: Base.table.update(it=new))


def in_a_default_by_name(value: Any) -> Place:
    def given(*, factor: Any = value) -> Any:
        return factor

    class Defaulted(Reader):
        def read(self) -> Any:
            return given()

    def put(new: Any) -> None:
        given.__kwdefaults__ = {"factor": new}

    return Place(Defaulted(), put)


def in_slots(value: Any) -> Place:
    class Settings:
        __slots__ = ("slot",)

    class Slotted(Reader):
        def read(self) -> Any:
            return self.config.slot

    model = Slotted()
    model.config = Settings()
    model.config.slot = value
    return Place(model, lambda new: setattr(model.config, "slot", new))


def in_a_loss(value: Any) -> Place:
    class Loss:
        def __init__(self) -> None:
            self.value = value

        def __call__(self, output: Tensor) -> Tensor:
            return torch.tanh(output).sum() * factor_of(self.value)

    loss_fn = Loss()
    return Place(nn.Linear(WIDTH, WIDTH), lambda new: setattr(loss_fn, "value", new), loss_fn)


def in_the_closure_of_a_loss(value: Any) -> Place:
    held = value

    def loss_fn(output: Tensor) -> Tensor:
        return (torch.tanh(output) * factor_of(held)).sum()

    def put(new: Any) -> None:
        nonlocal held
        held = new

    return Place(nn.Linear(WIDTH, WIDTH), put, loss_fn)


def in_a_loss_that_is_a_module(value: Any) -> Place:
    class Loss(nn.Module):
        def forward(self, output: Tensor) -> Tensor:
            return (torch.tanh(output) * factor_of(self.value)).sum()

    loss_fn = Loss()
    loss_fn.value = value
    return Place(nn.Linear(WIDTH, WIDTH), lambda new: setattr(loss_fn, "value", new), loss_fn)


def in_a_metaclass(value: Any) -> Place:
    class Meta(type):
        shared: Any

    class OfMeta(metaclass=Meta):
        pass

    class ReadsMeta(Reader):
        def read(self) -> Any:
            shared = OfMeta.shared
            # A function of a metaclass is bound to the class.
            return shared.__func__ if getattr(shared, "__self__", None) is OfMeta else shared

    Meta.shared = value
    return Place(ReadsMeta(), lambda new: setattr(Meta, "shared", new))


def in_a_class_below(value: Any) -> Place:
    """Where a method of a class reads what the class has from its base, until it has its own."""

    class Above:
        shared: Any = value

        @classmethod
        def read(cls) -> Any:
            return cls.shared

    class Below(Above):
        pass

    class ReadsBelow(Reader):
        def read(self) -> Any:
            return Below.read()

    def put(new: Any) -> None:
        if new is value:
            del Below.shared
        else:
            Below.shared = new

    return Place(ReadsBelow(), put)


def in_the_keywords_of_a_partial(value: Any) -> Place:
    held = functools.partial(dict, value=value)

    class OfPartial(Reader):
        def read(self) -> Any:
            return held()["value"]

    return Place(OfPartial(), lambda new: held.keywords.__setitem__("value", new))


def by_a_name_put_together(value: Any) -> Place:
    class PutTogether(Reader):
        def read(self) -> Any:
            return getattr(self, f"value_{len('a') + 1}")

    model = PutTogether()
    model.value_2 = value
    return Place(model, lambda new: setattr(model, "value_2", new))


def in_a_config_by_a_name_put_together(value: Any) -> Place:
    config = types.SimpleNamespace(value_2=value)

    class OfConfig(Reader):
        def read(self) -> Any:
            return getattr(config, "_".join(["value", "2"]))

    return Place(OfConfig(), lambda new: setattr(config, "value_2", new))


def in_a_module_that_forward_imports(value: Any) -> Place:
    class Imports(Reader):
        def read(self) -> Any:
            import tests_module_of_settings as settings  # pyright: ignore

            return settings.IMPORTED  # pyright: ignore

    there.IMPORTED = value  # type: ignore[attr-defined]
    return Place(Imports(), lambda new: setattr(there, "IMPORTED", new))


def from_a_module_that_forward_imports(value: Any) -> Place:
    class ImportsFrom(Reader):
        def read(self) -> Any:
            from tests_module_of_settings import NAMED  # pyright: ignore

            return NAMED  # pyright: ignore

    there.NAMED = value  # type: ignore[attr-defined]
    return Place(ImportsFrom(), lambda new: setattr(there, "NAMED", new))


def in_globals_by_a_text(value: Any) -> Place:
    class ByText(Reader):
        def read(self) -> Any:
            return globals()["BY_TEXT"]

    def put(new: Any) -> None:
        globals()["BY_TEXT"] = new

    put(value)
    return Place(ByText(), put)


PLACES: dict[str, tuple[Callable[[Any], Place], str]] = {
    "attribute": (in_an_attribute, "value"),
    "nested config": (in_a_config, "config.inner.value"),
    "list": (in_a_list, "item of"),
    "dictionary": (in_a_dictionary, "item of"),
    "closure": (in_a_closure, "variable held"),
    "global": (in_a_global, "global FACTOR"),
    "another module": (in_another_module, "FACTOR of tests_module_of_settings"),
    "class": (in_a_class, "OfClass.shared"),
    "over a class": (over_a_class, "shared"),
    "property": (in_a_property, "hidden"),
    "default": (in_a_default, "default of"),
    "default by name": (in_a_default_by_name, "default of"),
    "partial": (in_a_partial, "item of"),
    "name in a text": (by_a_name_in_text, "by_name"),
    "unknown attribute": (through_an_unknown_attribute, "wrapped_value"),
    "deep in lists": (deep_in_lists, "item of"),
    "submodule": (in_a_submodule, "child.value"),
    "function": (in_a_function, "held"),
    "owner of a method": (in_the_owner_of_a_method, "owned"),
    "dictionary of a class": (in_a_dictionary_of_a_class, "item of"),
    "slots": (in_slots, "config.slot"),
    "loss": (in_a_loss, "value"),
    "closure of a loss": (in_the_closure_of_a_loss, "variable held"),
    "loss that is a module": (in_a_loss_that_is_a_module, "value"),
    "metaclass": (in_a_metaclass, "Meta.shared"),
    "class below": (in_a_class_below, "Below.shared"),
    "keywords of a partial": (in_the_keywords_of_a_partial, "item of"),
    "name put together": (by_a_name_put_together, "value_2"),
    "config, by a name put together": (in_a_config_by_a_name_put_together, "value_2"),
    "module imported as it runs": (in_a_module_that_forward_imports, "IMPORTED of"),
    "name imported as it runs": (from_a_module_that_forward_imports, "NAMED of"),
    "globals by a text": (in_globals_by_a_text, "global BY_TEXT"),
}
"""By what it is called: who makes it, with the value that it has at first, and how it is named."""
