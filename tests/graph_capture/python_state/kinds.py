"""Kinds of values that code may read: two of each, which give two factors, and changes in place."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import types
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Mode(enum.Enum):
    PLAIN = 1.0
    DOUBLE = 2.0


@dataclasses.dataclass
class Options:
    factor: float = 1.0
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Fixed:
    factor: float


class Pair(NamedTuple):
    first: float
    second: float


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Scaling:
    """An object whose method is taken."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scale(self) -> float:
        return self.factor


def factor_of(value: Any) -> Any:
    """A factor from a value of any kind below: a number, or a tensor of one."""
    if isinstance(value, Tensor):
        return value
    if callable(value):
        return float(value())
    if isinstance(value, enum.Enum):
        return float(value.value)
    if hasattr(value, "factor"):
        return float(value.factor if getattr(value, "more", None) is None else value.more[0])
    if isinstance(value, collections.abc.Mapping):
        held = value["factor"]
        return float(held[0] if isinstance(held, list) else held)
    if isinstance(value, (list, tuple, deque, bytearray, array.array)):
        return float(sum(value))
    if isinstance(value, (set, frozenset)):
        return float(len(value))
    if isinstance(value, str):
        return float(len(value))
    if isinstance(value, torch.dtype):
        return float(value.itemsize)
    if isinstance(value, np.ndarray):
        return float(value.sum())
    return 0.5 if value is None else float(value)


def one() -> float:
    return 1.0


def two() -> float:
    return 2.0


KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "float": lambda: (1.0, 2.0),
    "int": lambda: (1, 2),
    "bool": lambda: (True, False),
    "bool for int": lambda: (2, True),
    "text": lambda: ("a", "ab"),
    "none": lambda: (None, 1.0),
    "to none": lambda: (1.0, None),
    "enum": lambda: (Mode.PLAIN, Mode.DOUBLE),
    "list": lambda: ([1.0, 2.0], [1.0, 3.0]),
    "tuple": lambda: ((1.0, 2.0), (1.0, 3.0)),
    "named tuple": lambda: (Pair(1.0, 2.0), Pair(1.0, 3.0)),
    "dict": lambda: ({"factor": 1.0}, {"factor": 2.0}),
    "set": lambda: ({1}, {1, 2}),
    "frozen set": lambda: (frozenset({1}), frozenset({1, 2})),
    "deque": lambda: (deque([1.0]), deque([2.0])),
    "array": lambda: (np.ones(2), np.full(2, 2.0)),
    "numpy number": lambda: (np.float64(1.0), np.float64(2.0)),
    "decimal": lambda: (Decimal("1.5"), Decimal("2.5")),
    "function": lambda: (one, two),
    "partial": lambda: (functools.partial(max, 1.0, 0.5), functools.partial(max, 2.0, 0.5)),
    "bound method": lambda: (Scaling(1.0).scale, Scaling(2.0).scale),
    "dtype": lambda: (torch.float32, torch.float64),
    "dataclass": lambda: (Options(1.0), Options(2.0)),
    "frozen dataclass": lambda: (Fixed(1.0), Fixed(2.0)),
    "namespace": lambda: (types.SimpleNamespace(factor=1.0), types.SimpleNamespace(factor=2.0)),
    "slots": lambda: (Slotted(1.0), Slotted(2.0)),
    "tensor": lambda: (torch.tensor(1.5), torch.tensor(2.5)),
}
"""Two values of each kind that give two factors, made anew at each call."""


def _with(**changes: Any) -> Callable[[Any], None]:
    return lambda it: [setattr(it, key, value) for key, value in changes.items()] and None


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1.0, 2.0], lambda it: it.__setitem__(0, 3.0)),
    "dict": (lambda: {"factor": 1.0}, lambda it: it.update(factor=2.0)),
    "set": (lambda: {1}, lambda it: it.add(2)),
    "deque": (lambda: deque([1.0]), lambda it: it.append(2.0)),
    "array": (lambda: np.ones(2), lambda it: it.__setitem__(0, 5.0)),
    "view of an array": (lambda: np.ones(4)[1:3], lambda it: it.base.__setitem__(1, 5.0)),
    "dataclass": (Options, _with(factor=2.0)),
    "list of a dataclass": (lambda: Options(more=[1.0]), lambda it: it.more.__setitem__(0, 2.0)),
    "list in a dict": (
        lambda: {"factor": [1.0]},
        lambda it: it["factor"].__setitem__(0, 2.0),
    ),
    "namespace": (lambda: types.SimpleNamespace(factor=1.0), _with(factor=2.0)),
    "slots": (lambda: Slotted(1.0), _with(factor=2.0)),
    "user dict": (lambda: collections.UserDict(factor=1.0), lambda it: it.update(factor=2.0)),
    "ordered dict": (
        lambda: collections.OrderedDict(factor=1.0),
        lambda it: it.update(factor=2.0),
    ),
    "chain map": (
        lambda: collections.ChainMap({}, {"factor": 1.0}),
        lambda it: it.maps[1].update(factor=2.0),
    ),
    "mapping proxy": (lambda: _Proxied.make(), lambda it: _Proxied.of(it).update(factor=2.0)),
    "bytes": (lambda: bytearray([1, 2]), lambda it: it.__setitem__(0, 3)),
    "numbers": (lambda: array.array("d", [1.0]), lambda it: it.__setitem__(0, 3.0)),
    "bound method": (lambda: Scaling(1.0).scale, lambda it: setattr(it.__self__, "factor", 2.0)),
    "partial of a dict": (
        lambda: functools.partial(dict.get, {"factor": 1.0}, "factor"),
        lambda it: it.args[0].update(factor=2.0),
    ),
    "tensor": (lambda: torch.tensor(1.5), lambda it: it.add_(1.0)),
}
"""How each kind of mutable value is made, and how it is changed in place."""


class _Proxied:
    """Dictionaries behind read-only views of them."""

    behind: dict[int, dict[str, float]] = {}  # noqa: RUF012

    @classmethod
    def make(cls) -> Any:
        held = {"factor": 1.0}
        proxy = types.MappingProxyType(held)
        cls.behind[id(proxy)] = held
        return proxy

    @classmethod
    def of(cls, proxy: Any) -> dict[str, float]:
        return cls.behind[id(proxy)]
