"""State of objects that forward reads: how it reads it, and how that changes between steps."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import fractions
import functools
import io
import multiprocessing
import operator
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler

Read = Callable[[Tensor], Any]
Change = Callable[[], Any]
Case = Callable[[Tensor], tuple[Read, Change]]
"""Given the batch: what forward multiplies by, and what changes it."""


def number_on_the_input(x: Tensor) -> tuple[Read, Change]:
    x.gain = 1.0
    return lambda x: x.gain, lambda: setattr(x, "gain", 2.0)


def dictionary_on_the_input(x: Tensor) -> tuple[Read, Change]:
    x.facts = {"gain": 1.0}
    return lambda x: x.facts["gain"], lambda: x.facts.update(gain=2.0)


def _optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def learning_rate(x: Tensor) -> tuple[Read, Change]:
    one = _optimizer()
    return lambda _: one.param_groups[0]["lr"], lambda: one.param_groups[0].update(lr=0.5)


def scheduler(x: Tensor) -> tuple[Read, Change]:
    one = torch.optim.lr_scheduler.StepLR(_optimizer(), 1, gamma=0.5)

    def change() -> None:
        one.optimizer.step()
        one.step()

    return lambda _: one.get_last_lr()[0], change


def state_of_an_optimizer(x: Tensor) -> tuple[Read, Change]:
    one = _optimizer()
    one.state["seen"] = 1
    return lambda _: one.state["seen"], lambda: one.state.update(seen=2)


def distribution(x: Tensor) -> tuple[Read, Change]:
    one = torch.distributions.Normal(0.0, 1.0)
    return lambda _: one.scale, lambda: setattr(one, "scale", torch.tensor(2.0))


def sampler(x: Tensor) -> tuple[Read, Change]:
    one = BatchSampler(SequentialSampler(range(8)), 1, drop_last=False)
    return lambda _: one.batch_size, lambda: setattr(one, "batch_size", 2)


def shared_value(x: Tensor) -> tuple[Read, Change]:
    one = multiprocessing.Value("d", 1.0)
    return lambda _: one.value, lambda: setattr(one, "value", 2.0)


def config_parser(x: Tensor) -> tuple[Read, Change]:
    one = configparser.ConfigParser()
    one.read_string("[loss]\nscale = 1.0")
    return lambda _: one.getfloat("loss", "scale"), lambda: one.set("loss", "scale", "2.0")


def teacher_in_eval_mode(x: Tensor) -> tuple[Read, Change]:
    held = [nn.BatchNorm1d(4, affine=False).eval()]
    held[0].running_mean.fill_(0.5)
    return lambda x: held[0](x), lambda: held[0].train()


def teacher_whose_layer_is_replaced(x: Tensor) -> tuple[Read, Change]:
    held = types.SimpleNamespace(teacher=nn.Sequential(nn.Tanh()))
    return lambda x: held.teacher(x), lambda: operator.setitem(held.teacher, 0, nn.Sigmoid())


def teacher_whose_weight_is_replaced(x: Tensor) -> tuple[Read, Change]:
    one = nn.Linear(4, 4).requires_grad_(False)

    def change() -> None:
        one.weight = nn.Parameter(2 * one.weight, requires_grad=False)

    return lambda x: one(x), change


def teacher_with_a_hook(x: Tensor) -> tuple[Read, Change]:
    one = nn.Identity()
    return lambda x: one(x), lambda: one.register_forward_hook(lambda m, args, out: 2 * out)


def teacher_with_a_rate(x: Tensor) -> tuple[Read, Change]:
    one = nn.LeakyReLU(0.1)
    return lambda x: one(x), lambda: setattr(one, "negative_slope", 0.5)


def module_in_a_weak_dictionary(x: Tensor) -> tuple[Read, Change]:
    key, held = nn.Identity(), weakref.WeakKeyDictionary[nn.Module, float]()
    held[key] = 1.0
    return lambda _: held[key], lambda: operator.setitem(held, key, 2.0)


def closure(x: Tensor) -> tuple[Read, Change]:
    scale = 1.0

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return lambda _: scale, change


class _Settings:
    of_class = 1.0
    hidden = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    @property
    def computed(self) -> float:
        return self.own

    def __getattr__(self, name: str) -> float:
        return self.own if name == "anything" else super().__getattribute__(name)

    def method(self) -> float:
        return self.own


def class_attribute(x: Tensor) -> tuple[Read, Change]:
    kind = type("OfCase", (_Settings,), {"of_class": 1.0})
    return lambda _: kind.of_class, lambda: setattr(kind, "of_class", 2.0)


def property_over_an_attribute(x: Tensor) -> tuple[Read, Change]:
    one = _Settings()
    return lambda _: one.computed, lambda: setattr(one, "own", 2.0)


def unknown_attribute(x: Tensor) -> tuple[Read, Change]:
    one = _Settings()
    return lambda _: one.anything, lambda: setattr(one, "own", 2.0)


def bound_method(x: Tensor) -> tuple[Read, Change]:
    one = _Settings()
    method = one.method
    return lambda _: method(), lambda: setattr(one, "own", 2.0)


def method_of_a_class(x: Tensor) -> tuple[Read, Change]:
    kind = type("OfCase", (_Settings,), {})
    one = kind()
    return lambda _: one.method(), lambda: setattr(kind, "method", lambda self: 2.0)


class _Descriptor:
    def __init__(self) -> None:
        self.kept = weakref.WeakKeyDictionary[Any, float]()

    def __get__(self, owner: Any, kind: type) -> Any:
        return self.kept.get(owner, 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.kept[owner] = value


def descriptor(x: Tensor) -> tuple[Read, Change]:
    class Described:
        it: Any = _Descriptor()

    one = Described()
    return lambda _: one.it, lambda: setattr(one, "it", 2.0)


def default_argument(x: Tensor) -> tuple[Read, Change]:
    def read(x: Tensor, scale: float = 1.0) -> float:
        return scale

    return read, lambda: setattr(read, "__defaults__", (2.0,))


def arguments_of_a_partial(x: Tensor) -> tuple[Read, Change]:
    read = functools.partial(lambda x, scale: scale[0], scale=[1.0])
    return read, lambda: read.keywords.update(scale=[2.0])


def cached_function(x: Tensor) -> tuple[Read, Change]:
    source = {"it": 1.0}

    @functools.lru_cache
    def read() -> float:
        return source["it"]

    def change() -> None:
        source["it"] = 2.0
        read.cache_clear()

    return lambda _: read(), change


def cached_property(x: Tensor) -> tuple[Read, Change]:
    class Cached:
        own = 1.0

        @functools.cached_property
        def it(self) -> float:
            return self.own

    one = Cached()

    def change() -> None:
        one.own = 2.0
        vars(one).pop("it", None)

    return lambda _: one.it, change


def metaclass(x: Tensor) -> tuple[Read, Change]:
    class Meta(type):
        shared = 1.0

    class Made(metaclass=Meta):
        pass

    return lambda _: Made.shared, lambda: setattr(Meta, "shared", 2.0)


def member_of_an_enum(x: Tensor) -> tuple[Read, Change]:
    class Kind(enum.Enum):
        LARGE = "large"

    Kind.LARGE.scale = 1.0
    return lambda _: Kind.LARGE.scale, lambda: setattr(Kind.LARGE, "scale", 2.0)


@dataclasses.dataclass
class _Record:
    scale: float = 1.0


class _Pair(NamedTuple):
    scale: float
    other: float = 0.0


def field_of_a_dataclass(x: Tensor) -> tuple[Read, Change]:
    one = _Record()
    return lambda _: one.scale, lambda: setattr(one, "scale", 2.0)


def named_tuple(x: Tensor) -> tuple[Read, Change]:
    held = [_Pair(1.0)]
    return lambda _: held[0].scale, lambda: held.__setitem__(0, _Pair(2.0))


def weak_reference(x: Tensor) -> tuple[Read, Change]:
    one = _Record()
    there = weakref.ref(one)
    return lambda _: there().scale, lambda: setattr(one, "scale", 2.0)


_variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


def context_variable(x: Tensor) -> tuple[Read, Change]:
    _variable.set(1.0)
    return lambda _: _variable.get(), lambda: _variable.set(2.0)


def thread_local(x: Tensor) -> tuple[Read, Change]:
    one = threading.local()
    one.scale = 1.0
    return lambda _: one.scale, lambda: setattr(one, "scale", 2.0)


def event(x: Tensor) -> tuple[Read, Change]:
    one = threading.Event()
    return lambda _: 2.0 if one.is_set() else 1.0, one.set


def length_of_a_queue(x: Tensor) -> tuple[Read, Change]:
    one: queue.Queue[int] = queue.Queue()
    return lambda _: 1.0 + one.qsize(), lambda: one.put(0)


def text_in_memory(x: Tensor) -> tuple[Read, Change]:
    one = io.StringIO("1.0")
    return lambda _: float(one.getvalue()), lambda: (one.seek(0), one.write("2.0"))


def how_far_an_iterator_is(x: Tensor) -> tuple[Read, Change]:
    one = iter([1, 2, 3])
    return lambda _: 1.0 + operator.length_hint(one), lambda: next(one)


def numpy_array_in_place(x: Tensor) -> tuple[Read, Change]:
    one = np.ones(3)
    return lambda _: float(one[0]), lambda: one.__setitem__(0, 2.0)


def object_in_a_numpy_array(x: Tensor) -> tuple[Read, Change]:
    held = np.array([_Record()], dtype=object)
    return lambda _: held[0].scale, lambda: setattr(held[0], "scale", 2.0)


def number_of_c(x: Tensor) -> tuple[Read, Change]:
    one = ctypes.c_double(1.0)
    return lambda _: one.value, lambda: setattr(one, "value", 2.0)


def bytes_behind_a_view(x: Tensor) -> tuple[Read, Change]:
    held = bytearray(b"\1")
    view = memoryview(held)
    return lambda _: float(view[0]), lambda: held.__setitem__(0, 2)


def array_of_numbers(x: Tensor) -> tuple[Read, Change]:
    one = array.array("d", [1.0])
    return lambda _: one[0], lambda: one.__setitem__(0, 2.0)


def chain_of_dictionaries(x: Tensor) -> tuple[Read, Change]:
    below = {"scale": 1.0}
    one = collections.ChainMap({}, below)
    return lambda _: one["scale"], lambda: below.update(scale=2.0)


def dictionary_of_a_users_kind(x: Tensor) -> tuple[Read, Change]:
    one = collections.UserDict(scale=1.0)
    return lambda _: one["scale"], lambda: one.update(scale=2.0)


def counter(x: Tensor) -> tuple[Read, Change]:
    one = collections.Counter(a=1)
    return lambda _: one["a"], lambda: one.update("a")


def queue_with_two_ends(x: Tensor) -> tuple[Read, Change]:
    one = collections.deque([1.0])
    return lambda _: one[-1], lambda: one.append(2.0)


def view_of_a_dictionary(x: Tensor) -> tuple[Read, Change]:
    below = {"scale": 1.0}
    view = below.values()
    return lambda _: next(iter(view)), lambda: below.update(scale=2.0)


def fraction(x: Tensor) -> tuple[Read, Change]:
    held = {"it": fractions.Fraction(1, 2)}
    return lambda _: float(held["it"]), lambda: held.update(it=fractions.Fraction(2, 3))


def decimal_context(x: Tensor) -> tuple[Read, Change]:
    context = decimal.Context(prec=2)
    third = decimal.Decimal(3)
    return lambda _: float(context.divide(1, third)), lambda: setattr(context, "prec", 1)


def seed_of_a_generator(x: Tensor) -> tuple[Read, Change]:
    one = torch.Generator().manual_seed(1)
    return lambda _: float(one.initial_seed()), lambda: one.manual_seed(2)


def state_of_a_generator(x: Tensor) -> tuple[Read, Change]:
    one = random.Random(1)
    return lambda _: one.getstate()[1][1] / 2**32, lambda: one.seed(3)


def tensor_of_a_plain_object(x: Tensor) -> tuple[Read, Change]:
    one = types.SimpleNamespace(scale=torch.tensor(1.0))
    return lambda _: one.scale, lambda: setattr(one, "scale", torch.tensor(2.0))


class _Registry:
    kept: ClassVar[dict[str, Any]] = {}


def registry_of_a_class(x: Tensor) -> tuple[Read, Change]:
    _Registry.kept["scale"] = [1.0]
    return lambda _: _Registry.kept["scale"][0], lambda: _Registry.kept.update(scale=[2.0])


def class_of_an_object(x: Tensor) -> tuple[Read, Change]:
    class Twice(_Settings):
        def method(self) -> float:
            return 2.0

    one = _Settings()
    return lambda _: one.method(), lambda: setattr(one, "__class__", Twice)
