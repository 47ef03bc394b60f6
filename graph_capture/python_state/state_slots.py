"""Places where Python keeps a value: entries of dictionaries, items of lists, cells, attributes."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import inspect
import io
import itertools
import mmap
import operator
import os
import pickle
import random
import warnings
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType, FunctionType, GeneratorType, MappingProxyType
from typing import Any

import numpy as np
import torch

from remat.graph_capture.python_state.module_hooks import Hook, ModuleHooks
from remat.graph_capture.torch_private.core import disable_current_modes

_FX = inspect.getfile(torch.fx.Tracer)
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()

PLAIN = (  # types whose values are compared by what they are, not by who they are
    int, float, complex, bool, str, bytes, type(None), range, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum,
)  # fmt: skip


@dataclass(frozen=True)
class DictItem:
    """A name of a namespace: an instance's or a module's ``__dict__``, a class's, a dictionary."""

    text: str
    space: Any  # of a class, it can only be read
    key: Any
    value: Any
    owner: Any = None  # whose namespace it is; a class is written through it

    def now(self) -> Any:
        return self.space.get(self.key, MISSING)

    def put(self, value: Any) -> None:
        """Set it, or remove it where `value` is `MISSING`."""
        if isinstance(self.owner, type):
            _put_attribute(self.owner, self.key, value)
        elif value is MISSING:
            self.space.pop(self.key, None)
        else:
            self.space[self.key] = value

    def term(self, name: Callable[[Any], str]) -> str:
        """An expression that is true while the very object is there."""
        if self.value is MISSING:
            return f"{name(self.key)} not in {name(self.space)}"
        return f"{name(self.space)}[{name(self.key)}] is {name(self.value)}"


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@dataclass(frozen=True)
class ClosureCell:
    text: str
    cell: CellType
    value: Any

    def now(self) -> Any:
        with contextlib.suppress(ValueError):  # an empty cell raises a ValueError
            return self.cell.cell_contents
        return MISSING

    def put(self, value: Any) -> None:
        _put_attribute(self.cell, "cell_contents", value)

    def term(self, name: Callable[[Any], str]) -> str:
        return f"{name(self.cell)}.cell_contents is {name(self.value)}"


@dataclass(frozen=True)
class SlotAttr:
    """An attribute that is not in a ``__dict__``: of ``__slots__``, or a function's defaults."""

    text: str
    owner: Any
    key: str
    value: Any

    def now(self) -> Any:
        return getattr(self.owner, self.key, MISSING)

    def put(self, value: Any) -> None:
        _put_attribute(self.owner, self.key, value)

    def term(self, name: Callable[[Any], str]) -> str:
        return f"{name(self.owner)}.{self.key} is {name(self.value)}"


@dataclass(frozen=True)
class ContainerItems:
    """All items of a list, deque, set, dictionary or array, beside a copy of them."""

    text: str
    owner: Any
    value: Any

    def now(self) -> Any:
        return copied(self.owner)

    def put(self, value: Any) -> None:
        refill(self.owner, value)

    def term(self, name: Callable[[Any], str]) -> str:
        return f"{name(holds)}({name(self.owner)}, {name(self.value)})"


StateSlot = DictItem | ClosureCell | SlotAttr | ContainerItems | ModuleHooks

# Items go by methods of the base: a subclass may have its own, as one that makes what is looked up.
_BASES: tuple[Any, ...] = (list, deque, set, OrderedDict, dict)
_NUMBERS = (bytearray, array)
CONTAINERS = (*_BASES, *_NUMBERS, np.ndarray, MappingProxyType)


def _base(owner: Any) -> Any:
    return next(base for base in _BASES if isinstance(owner, base))


def copied(owner: Any) -> Any:
    """A shallow copy of a container, in the plain type that it is made of."""
    if isinstance(owner, np.ndarray):
        return owner.copy()
    if isinstance(owner, _NUMBERS):
        return owner[:]
    if isinstance(owner, MappingProxyType):
        return dict(owner)
    if isinstance(owner, dict):
        return dict(dict.items(owner))
    base = _base(owner)
    return base(base.__iter__(owner))


def refill(owner: Any, value: Any) -> None:
    """Make a container hold `value`, a copy of it, again."""
    if isinstance(owner, MappingProxyType) or holds(owner, value):  # what is behind it stays
        return
    if isinstance(owner, (np.ndarray, *_NUMBERS)):
        whole: Any = ... if isinstance(owner, np.ndarray) else slice(None)
        owner[whole] = value
        return
    base = _base(owner)
    base.clear(owner)
    if isinstance(owner, dict):
        for key, item in value.items():
            base.__setitem__(owner, key, item)
    else:
        (base.update if base is set else base.extend)(owner, value)


def holds(owner: Any, value: Any) -> bool:
    """Whether a container holds the very items of `value`, a copy of it; of arrays, the bits."""
    if isinstance(owner, np.ndarray):
        same = owner.shape == value.shape and owner.dtype == value.dtype  # by bits: -0.0 is not 0.0
        return same and owner.tobytes() == value.tobytes()
    if isinstance(owner, _NUMBERS):
        return _bits(owner) == _bits(value)
    if isinstance(owner, MappingProxyType):
        owner = dict(owner)
    base = _base(owner)
    if base.__len__(owner) != len(value):
        return False
    if isinstance(owner, dict):
        keys = all(map(operator.is_, dict.keys(owner), value))
        return keys and all(map(operator.is_, dict.values(owner), value.values()))
    if isinstance(owner, set):
        return set.__eq__(owner, value)  # sets have no order to compare by identity
    return all(map(operator.is_, base.__iter__(owner), value))


def _bits(numbers: Any) -> tuple[Any, bytes]:
    return getattr(numbers, "typecode", None), bytes(memoryview(numbers).cast("B"))


def is_same(now: Any, before: Any) -> bool:
    """Whether a value is what it was: the very object, or a plain one of that type and value."""
    if now is before:
        return True
    if type(now) is not type(before):  # true, 1 and 1.0 are three values
        return False
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)  # by text: NaN is NaN, and 0.0 is not -0.0
    if isinstance(now, (*PLAIN, set, frozenset)):
        return bool(now == before)
    if isinstance(now, (tuple, list, deque)):
        return len(now) == len(before) and all(map(is_same, now, before))
    if isinstance(now, dict):
        # In their order, in which code may go through them.
        return list(now) == list(before) and all(map(is_same, now.values(), before.values()))
    if isinstance(now, (np.ndarray, *_NUMBERS)):
        return holds(now, before)
    if isinstance(now, np.generic):
        return now.tobytes() == before.tobytes()
    if isinstance(now, Hook):
        return now.is_like(before)
    return is_same_function(now, before)


def is_same_function(now: Any, before: Any) -> bool:
    """Whether two are one function, or bound methods of one object."""
    now, before = _without_fx(now), _without_fx(before)  # fx puts its own in some places
    if now is before:
        return True
    function = getattr(now, "__func__", None)  # each look-up makes a bound method anew
    is_one = function is not None and function is getattr(before, "__func__", None)
    return is_one and now.__self__ is before.__self__


def _without_fx(value: Any) -> Any:
    is_fxs = isinstance(value, FunctionType) and value.__code__.co_filename == _FX
    return getattr(value, "__wrapped__", value) if is_fxs else value


GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_SETTINGS = frozenset({  # beside those that every plan compares
    "get_default_device", "get_deterministic_debug_mode", "get_num_interop_threads",
    "get_num_threads", "is_anomaly_enabled", "is_warn_always_enabled",
})  # fmt: skip
_OF_ALL = (random._inst, np.random.mtrand._rand)  # pyright: ignore  # watched while forward runs

_ENDLESS = -1  # how much is left of an iterator that does not end, such as `itertools.repeat`


@dataclass(frozen=True)
class OpaqueState:
    """State that only a call can read, such as an iterator's position, and its value at capture."""

    text: str  # each planned step would take the same next item, and a walk sees no change
    owner: Any
    ask: Callable[[Any], Any]  # from the owner to its state
    value: Any

    def now(self) -> Any:
        return self.ask(self.owner)

    def put(self, value: Any) -> None:
        """Nothing: an iterator only goes on."""

    def term(self, name: Callable[[Any], str]) -> str:
        return f"{name(is_same)}({name(self.ask)}({name(self.owner)}), {name(self.value)})"


NUMBERS_OF_C = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)
_PROXY = ("multiprocessing.managers", "BaseProxy")
_RAW = (mmap.mmap, memoryview)
_TEXTS = (io.StringIO, io.BytesIO)


def _memory_of(value: Any) -> bytes | str | None:
    """What an object of C holds, which no attribute shows; None for any other object."""
    if isinstance(value, NUMBERS_OF_C):
        return bytes(value)
    if isinstance(value, _RAW):
        return value.tobytes() if isinstance(value, memoryview) else value[:]
    if isinstance(value, _TEXTS):
        return value.getvalue()
    return _beside_this_process(value)


def _beside_this_process(value: Any) -> bytes | None:
    """What processes share: a manager's object, or the count of a semaphore, as of an event."""
    kind = type(value)
    # A lock counts to 1, and holds no number.
    if kind.__module__ == "_multiprocessing" and getattr(value, "maxvalue", 1) > 1:
        return bytes(str(value._get_value()), "ascii")
    if any((one.__module__, one.__name__) == _PROXY for one in kind.__mro__):
        return pickle.dumps(value._getvalue())
    return None


def opaque_state(text: str, owner: Any) -> OpaqueState | None:
    """The place of an object that hides a state; None for any other."""
    if isinstance(owner, ContextVar):
        return OpaqueState(text, owner, _context, _context(owner))
    if (held := _memory_of(owner)) is not None:
        return OpaqueState(text, owner, _memory_of, held)
    if isinstance(owner, Iterator):
        return OpaqueState(text, owner, _progress, _progress(owner))
    return None


class SettingsBefore:
    def __init__(self) -> None:
        self._variables = dict(vars(os.environ)["_data"])
        self._said = {name: _said_by_torch(name, torch) for name in sorted(_SETTINGS)}

    def asked(
        self, global_names: Collection[str], names: Collection[str], texts: Collection[str]
    ) -> Iterator[OpaqueState]:
        """Those that code may ask for; `names` and `texts` have variables in capitals."""
        for name in sorted(_SETTINGS.intersection(names)):
            ask = functools.partial(_said_by_torch, name)
            yield OpaqueState(f"torch.{name}()", torch, ask, self._said[name])
        # Code that names neither reads no variable.
        if {"environ", "getenv"}.isdisjoint({*global_names, *names}):
            return
        capitals = sorted({name for name in (*names, *texts) if name.isupper()})
        keys = tuple(map(os.environ.encodekey, capitals))
        text = "one of the environment variables that the code names"
        before = tuple(map(self._variables.get, keys))
        yield OpaqueState(text, os.environ, functools.partial(_variables, keys), before)


@dataclass(frozen=True)
class Stream:
    """A user's own generator of random numbers, and where it was. It may move between steps."""

    text: str
    owner: Any
    state: Any

    def has_moved(self) -> bool:
        return self.now() != self.state[0]

    def now(self) -> bytes:
        return pickle.dumps(_state_of(self.owner))  # arrays compare by element

    def put_back(self) -> None:
        if self.has_moved():
            _set_state(self.owner, self.state[1])


def stream(text: str, owner: Any) -> Stream | None:
    """A generator of its own; None for the streams that all share, and where no state is."""
    of_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    if any(owner is one for one in (*_OF_ALL, torch.default_generator, *of_cuda)):
        return None
    with contextlib.suppress(NotImplementedError):  # random.SystemRandom
        state = _state_of(owner)
        return Stream(text, owner, (pickle.dumps(state), state))
    return None


def _state_of(owner: Any) -> Any:
    if isinstance(owner, random.Random):
        return owner.getstate()
    if isinstance(owner, torch.Generator):
        with disable_current_modes():  # a trace's own would make a tensor without data
            return owner.get_state().numpy()
    return owner.get_state() if hasattr(owner, "get_state") else owner.bit_generator.state


def _set_state(owner: Any, state: Any) -> None:
    if isinstance(owner, random.Random):
        owner.setstate(state)
    elif isinstance(owner, torch.Generator):
        with disable_current_modes():
            owner.set_state(torch.from_numpy(state))
    elif hasattr(owner, "get_state"):
        owner.set_state(state)
    else:
        owner.bit_generator.state = state


def _said_by_torch(name: str, module: Any) -> Any:
    return getattr(module, name)()


def _context(variable: ContextVar[Any]) -> Any:
    return variable.get(MISSING)


def _variables(keys: tuple[Any, ...], environ: Mapping[str, str]) -> Any:
    return tuple(map(vars(environ)["_data"].get, keys))  # its own `get` encodes each name


def _progress(iterator: Any) -> Any:
    """What differs once an iterator has given an item; `MISSING` where nothing can be seen."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
    if isinstance(iterator, itertools.count):
        return repr(iterator)  # its repr alone shows the number
    if hasattr(iterator, "__length_hint__"):
        return operator.length_hint(iterator, _ENDLESS)  # those over containers tell what is left
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns, and 3.14 cannot
            return _taken_apart(iterator.__reduce__())
    except TypeError:  # newer Pythons do not take some of them apart
        return MISSING


def _taken_apart(parts: Any) -> Any:
    if isinstance(parts, tuple):
        return tuple(map(_taken_apart, parts))
    return _progress(parts) if isinstance(parts, Iterator) else parts
