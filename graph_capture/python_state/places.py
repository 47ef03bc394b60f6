"""Places where Python keeps a value: entries of dictionaries, items of lists, cells, attributes."""

from __future__ import annotations

import enum
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CellType
from typing import Any

import numpy as np
import torch

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()

PLAIN = (
    int, float, complex, bool, str, bytes, type(None), range, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum,
)  # fmt: skip
"""Types whose values are compared by what they are, not by who they are."""


@dataclass(frozen=True)
class Entry:
    """A name of a namespace: an instance's or a module's ``__dict__``, a class's, a dictionary.

    Attributes
    ----------
    text : what it is, for a person. space : the mapping, of which a class's can only be read.
    owner : whose namespace it is; of a class, the way to write it.
    """

    text: str
    space: Any
    key: Any
    value: Any
    owner: Any = None

    def now(self) -> Any:
        """Its value now; `MISSING` where there is none."""
        return self.space.get(self.key, MISSING)

    def put(self, value: Any) -> None:
        """Set it, or remove it where `value` is `MISSING`."""
        if isinstance(self.owner, type):
            delattr(self.owner, self.key) if value is MISSING else setattr(
                self.owner, self.key, value
            )
        elif value is MISSING:
            self.space.pop(self.key, None)
        else:
            self.space[self.key] = value

    def renewed(self) -> Entry:
        """The same place with the value that it has now."""
        return replace(self, value=self.now())

    def term(self, name: Callable[[Any], str]) -> str:
        """An expression that is true while the very object is there."""
        if self.value is MISSING:
            return f"{name(self.key)} not in {name(self.space)}"
        return f"{name(self.space)}[{name(self.key)}] is {name(self.value)}"


@dataclass(frozen=True)
class Cell:
    """A variable that a function has from the one around it."""

    text: str
    cell: CellType
    value: Any

    def now(self) -> Any:
        """Its value now; `MISSING` where it is not set."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return MISSING

    def put(self, value: Any) -> None:
        """Set it, or empty it where `value` is `MISSING`."""
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value

    def renewed(self) -> Cell:
        """The same place with the value that it has now."""
        return replace(self, value=self.now())

    def term(self, name: Callable[[Any], str]) -> str:
        """An expression that is true while the very object is there."""
        return f"{name(self.cell)}.cell_contents is {name(self.value)}"


@dataclass(frozen=True)
class Slot:
    """An attribute that is not in a ``__dict__``: of ``__slots__``, or a function's defaults."""

    text: str
    owner: Any
    key: str
    value: Any

    def now(self) -> Any:
        """Its value now; `MISSING` where there is none."""
        return getattr(self.owner, self.key, MISSING)

    def put(self, value: Any) -> None:
        """Set it, or remove it where `value` is `MISSING`."""
        if value is MISSING:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)

    def renewed(self) -> Slot:
        """The same place with the value that it has now."""
        return replace(self, value=self.now())

    def term(self, name: Callable[[Any], str]) -> str:
        """An expression that is true while the very object is there."""
        return f"{name(self.owner)}.{self.key} is {name(self.value)}"


@dataclass(frozen=True)
class Contents:
    """All items of a list, deque, set, dictionary or array, beside a copy of them."""

    text: str
    owner: Any
    value: Any

    def now(self) -> Any:
        """A copy of what it holds now."""
        return copied(self.owner)

    def put(self, value: Any) -> None:
        """Fill it with `value`, in place."""
        if isinstance(self.owner, np.ndarray):
            self.owner[...] = value
            return
        self.owner.clear()
        fill = self.owner.extend if isinstance(self.owner, (list, deque)) else self.owner.update
        fill(value)

    def renewed(self) -> Contents:
        """The same place with the value that it has now."""
        return replace(self, value=self.now())

    def term(self, name: Callable[[Any], str]) -> str:
        """An expression that is true while it holds the very same items."""
        return f"{name(_SAME[_kind(self.owner)])}({name(self.owner)}, {name(self.value)})"


Place = Entry | Cell | Slot | Contents


def copied(owner: Any) -> Any:
    """A shallow copy of a container; of a dictionary's items, a dictionary."""
    return owner.copy()


def _kind(owner: Any) -> type:
    return next(kind for kind in _SAME if isinstance(owner, kind))


def _same_items(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _same_entries(now: Any, before: Any) -> bool:
    return _same_items(now, before) and all(map(operator.is_, now.values(), before.values()))


def _same_array(now: Any, before: Any) -> bool:
    return now.shape == before.shape and now.dtype == before.dtype and _bits(now) == _bits(before)


def _bits(array: Any) -> bytes:
    # By bits: NaN is NaN, and -0.0 is not 0.0.
    return array.tobytes()


_SAME: dict[type, Callable[[Any, Any], bool]] = {
    list: _same_items,
    deque: _same_items,
    set: operator.eq,
    dict: _same_entries,
    np.ndarray: _same_array,
}
CONTAINERS = tuple(_SAME)


def is_same(now: Any, before: Any) -> bool:
    """Whether a value is what it was: the very object, or a plain one of that type and value.

    `True`, 1 and 1.0 are three values; so are 0.0 and -0.0; NaN is NaN.
    """
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)
    if isinstance(now, PLAIN):
        return bool(now == before)
    if isinstance(now, (tuple, list, deque)):
        return len(now) == len(before) and all(map(is_same, now, before))
    if isinstance(now, dict):
        return list(now) == list(before) and all(map(is_same, now.values(), before.values()))
    if isinstance(now, (set, frozenset)):
        return now == before
    if isinstance(now, np.ndarray):
        return _same_array(now, before)
    if isinstance(now, np.generic):
        return now.tobytes() == before.tobytes()
    return is_same_function(now, before)


def is_same_function(now: Any, before: Any) -> bool:
    """Whether two bound methods, which each look-up makes anew, are of one function and object."""
    function = getattr(now, "__func__", None)
    return (
        function is not None
        and function is getattr(before, "__func__", None)
        and now.__self__ is before.__self__
    )
