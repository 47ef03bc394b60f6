"""The names that all code in reach loads: of globals, of objects of each class, of anything."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from remat.graph_capture.python_state.code_names import Names, names_of
from remat.graph_capture.python_state.library_objects import DATA, is_looked_into
from remat.graph_capture.python_state.places import PLAIN
from remat.graph_capture.python_state.reached import (
    OF_DATA,
    RUN_BY_TORCH,
    STATE,
    is_installed,
    is_library,
)

_OF_MODULES = frozenset(vars(nn.Module()))


class LoadedNames:
    """Names of the functions that a walk has come by.

    Parameters
    ----------
    texts : that may name attributes.

    Attributes
    ----------
    others : attributes of anything. global_names : of modules.
    by_libraries : attributes of anything, by methods of objects that are looked into.
    new, new_asking : names, and classes whose attributes code may ask for by any name (None: those
        of anything), that were added. Who looks them up takes them out.
    """

    def __init__(self, texts: set[str]) -> None:
        self.texts = texts
        self.others: set[str] = set(RUN_BY_TORCH)
        self.by_libraries: set[str] = set()
        self.global_names: set[str] = set()
        self.new: list[str] = []
        self.new_asking: list[type | None] = []
        self._own: dict[type, set[str]] = {}
        self._heirs: dict[type, list[type]] = {}
        self._methods: set[FunctionType] = set()
        self._asking: set[type | None] = set()

    def __len__(self) -> int:
        own = sum(map(len, self._own.values()))
        return len(self.others) + len(self.by_libraries) + len(self.texts) + own

    def add_texts(self, texts: Iterable[str]) -> None:
        """Add texts that may name an attribute."""
        self._add_to(self.texts, texts)

    def add_method(self, kind: type, function: FunctionType) -> None:
        """Add a function that is a method of a class."""
        names = names_of(function.__code__)
        if kind not in self._own:
            self._own[kind] = set()
            for base in kind.__mro__[1:]:
                self._heirs.setdefault(base, []).append(kind)
        if is_looked_into(kind) and is_library(function.__module__):
            self._add_to(self._own[kind], names.own - DATA)
            self._add_to(self.by_libraries, names.others - DATA)
            return
        self._add_to(self._own[kind], names.own)
        self._add_to(self.others, names.others)
        self._methods.add(function)
        if names.asks_own:
            self._add_asking(kind)

    def add(self, function: FunctionType) -> Names:
        """Add any function, whose first argument may be of any class; its names."""
        names = names_of(function.__code__)
        self._add_to(self.others, names.others | names.own)
        self.global_names |= names.global_names
        if names.asks_others or (names.asks_own and function not in self._methods):
            self._add_asking(None)
        return names

    def _add_to(self, known: set[str], names: Iterable[str]) -> None:
        new = set(names) - known
        known |= new
        self.new += sorted(new)

    def _add_asking(self, kind: type | None) -> None:
        if kind not in self._asking:
            self._asking.add(kind)
            self.new_asking.append(kind)

    def is_loaded_of(self, kind: type) -> Callable[[str], bool]:
        """Whether code loads a name of objects of that class; methods of its bases do too."""
        related = self._related(kind)
        own = [self._own[one] for one in related if one in self._own]
        sets = [self.others, self.texts, *own]
        is_open = any(map(is_looked_into, kind.__mro__))
        if is_open:
            sets.append(self.by_libraries)
        # What a module of torch has under such names is torch's to change, as an LSTM's weights.
        hides = is_library(kind.__module__) and not is_open and not issubclass(kind, Tensor)

        def is_loaded(name: str) -> bool:
            is_out = name in STATE or (hides and name[:1] == "_")
            return not is_out and any(name in one for one in sets)

        return is_loaded

    def is_asked_of(self, kind: type) -> Callable[[str, Any], bool]:
        """Whether code may ask for a name of objects of that class that it puts together.

        By a method's own first argument, or of what holds data. Of a library's objects numbers,
        texts and the like count alone: what else they hold is seldom read so, and often changed.
        """
        is_own = not self._asking.isdisjoint(self._related(kind))
        holds_data = kind.__module__ in OF_DATA or dataclasses.is_dataclass(kind)
        is_asked = is_own or (None in self._asking and holds_data)
        is_any_kind = not is_installed(sys.modules.get(kind.__module__))

        def is_asked_for(name: str, value: Any) -> bool:
            is_out = name in _OF_MODULES or name.startswith("_remat_")
            return is_asked and not is_out and (is_any_kind or isinstance(value, PLAIN))

        return is_asked_for

    def named_for(self, kind: type) -> set[str]:
        """All that code itself names of objects of that class."""
        own = (self._own.get(one, ()) for one in self._related(kind))
        named = self.others.union(*own) - STATE
        return {name for name in named if name[0] != "_"} if is_library(kind.__module__) else named

    def _related(self, kind: type) -> tuple[type, ...]:
        return (*kind.__mro__, *self._heirs.get(kind, ()))


def is_related(kind: type, asking: type | None) -> bool:
    """Whether methods of a class may be those of objects of `kind`; None: code of any class."""
    return asking is None or asking in kind.__mro__ or kind in asking.__mro__
