"""The names that all code in reach loads: of globals, of objects of each class, of anything."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

from torch import nn

from remat.graph_capture.python_state.code_names import Names, names_of
from remat.graph_capture.python_state.reached import OF_DATA, RUN_BY_TORCH, STATE, is_library

_OF_MODULES = frozenset(vars(nn.Module()))


class LoadedNames:
    """Names of the functions that a walk has come by.

    Parameters
    ----------
    texts : that may name attributes; the walk adds to them.

    Attributes
    ----------
    others : attributes of anything. global_names : of modules.
    """

    def __init__(self, texts: set[str]) -> None:
        self.texts = texts
        self.others: set[str] = set(RUN_BY_TORCH)
        self.global_names: set[str] = set()
        self._own: dict[type, set[str]] = {}
        self._heirs: dict[type, list[type]] = {}
        self._methods: set[FunctionType] = set()
        # Classes whose attributes code may ask for by any name; None: those of all.
        self._asking: set[type | None] = set()

    def __len__(self) -> int:
        return len(self.others) + len(self.texts) + sum(map(len, self._own.values()))

    def add_method(self, kind: type, function: FunctionType) -> None:
        """Add a function that is a method of a class."""
        names = names_of(function.__code__)
        if kind not in self._own:
            self._own[kind] = set()
            for base in kind.__mro__[1:]:
                self._heirs.setdefault(base, []).append(kind)
        self._own[kind] |= names.own
        self.others |= names.others
        self._methods.add(function)
        if names.asks_own:
            self._asking.add(kind)

    def add(self, function: FunctionType) -> Names:
        """Add any function, whose first argument may be of any class; its names."""
        names = names_of(function.__code__)
        self.others |= names.others | names.own
        self.global_names |= names.global_names
        if names.asks_others or (names.asks_own and function not in self._methods):
            self._asking.add(None)
        return names

    def is_loaded_of(self, kind: type) -> Callable[[str], bool]:
        """Whether code loads a name of objects of that class; methods of its bases do too."""
        related = self._related(kind)
        own = [self._own[one] for one in related if one in self._own]
        sets = [self.others, self.texts, *own]
        # What a module of torch has under such names is torch's to change, as an LSTM's weights.
        hides = is_library(kind.__module__)
        is_users = not hides or kind.__module__ in OF_DATA
        any_counts = is_users and not self._asking.isdisjoint((None, *related))

        def is_loaded(name: str) -> bool:
            if name in STATE or (hides and name[:1] == "_"):
                return False
            return any(name in one for one in sets) or (any_counts and name not in _OF_MODULES)

        return is_loaded

    def named_for(self, kind: type) -> set[str]:
        """All that code itself names of objects of that class."""
        own = (self._own.get(one, ()) for one in self._related(kind))
        named = self.others.union(*own) - STATE
        return {name for name in named if name[0] != "_"} if is_library(kind.__module__) else named

    def _related(self, kind: type) -> tuple[type, ...]:
        return (*kind.__mro__, *self._heirs.get(kind, ()))
