"""Names of what a walk over Python's state comes by; each that code loads is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import nn

from remat.graph_capture.python_state.executed_code import LoadedNames, is_related
from remat.graph_capture.python_state.reachable_objects import (
    AROUND_DATA,
    NOT_RUN,
    Absent,
    Namespace,
    ReachableObjects,
    functions_of,
    is_library,
    is_looked_into,
)
from remat.graph_capture.python_state.state_slots import MISSING, DictItem

_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")


class Namespaces:
    def __init__(
        self,
        names: LoadedNames,
        add: Callable[[DictItem], None],
        read_method: Callable[[type, FunctionType], None],
    ) -> None:
        self._names = names
        self._add, self._read_method = add, read_method  # called with each place; with each method
        self._held: list[Any] = []  # an identity is of an object that lives
        self._before: dict[int, dict[str, Any]] = {}
        self._instances: dict[type, list[Namespace]] = {}
        self._having: dict[str, list[Namespace]] = {}
        self._classes: dict[type, Namespace] = {}
        self._called: set[type] = set()

    def add_module(self, module: ModuleType) -> None:
        self._add_space(Namespace(module.__name__, module, vars(module)))

    def add_class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if owner in (object, nn.Module) or owner in self._classes:
                continue
            is_read = issubclass(owner, nn.Module) or is_looked_into(owner)
            if is_read or not is_library(owner.__module__):
                self._classes[owner] = Namespace(owner.__name__, owner, vars(owner))
                self._add_space(self._classes[owner])

    def call(self, kind: type) -> None:
        for owner in kind.__mro__:
            if owner not in self._called:  # the constructor of a class that is named may run
                self._called.add(owner)
                if owner in self._classes:
                    self._read(self._classes[owner], _CONSTRUCTORS)

    def add_instance(self, text: str, value: Any, space: dict[str, Any]) -> None:
        added = Namespace(text, value, space)
        self._instances.setdefault(type(value), []).append(added)
        self._add_space(added)

    def read_named(self, name: str) -> None:
        for space in self._having.get(name, ()):
            self._read(space, (name,))

    def read_asking(self, asking: type | None) -> None:
        """Read what code of a class (None: of any) asks for by names that it computes."""
        for kind in [one for one in self._instances if is_related(one, asking)]:
            for space in self._instances[kind]:
                self._read(space, space.before)

    def _add_space(self, space: Namespace) -> None:
        # A class makes another view of its namespace at each look.
        holder = space.value if isinstance(space.value, type) else space.space
        space.before = self.as_before(space.space, holder)
        for key in space.before:
            self._having.setdefault(key, []).append(space)
        self._read(space, space.before)

    def as_before(self, space: Any, holder: Any = None) -> dict[str, Any]:
        holder = space if holder is None else holder
        if id(holder) not in self._before:
            self._before[id(holder)] = dict(space)  # a copy: code may write before it reads
            self._held.append(holder)
        return self._before[id(holder)]

    def _read(self, space: Namespace, keys: Iterable[str]) -> None:
        keys = [key for key in keys if key in space.before and key not in space.done]
        if isinstance(space.value, type):
            self._read_class(space, space.value, keys)
        elif isinstance(space.value, ModuleType):
            for key in sorted(self._names.others.intersection(keys)):
                self._add_key(space, key, f"{key} of {space.text}")
        else:
            self._read_instance(space, keys)

    def _read_class(self, space: Namespace, kind: type, keys: Iterable[str]) -> None:
        is_named = self._names.is_loaded_of(kind)
        for key in sorted(keys):
            is_special = key.startswith("__") and key.endswith("__")
            # No code may name a special method; a constructor runs only if the class is called.
            may_run = kind in self._called if key in _CONSTRUCTORS else key not in NOT_RUN
            if not is_named(key) and not (is_special and may_run):
                continue
            space.done.add(key)
            value = space.before[key]
            functions = list(functions_of(value))
            for function in functions:
                self._read_method(kind, function)
            if functions and is_looked_into(kind):
                continue  # its methods are torch's or Python's own
            if functions or not is_special:
                text = f"{kind.__name__}.{key}"
                self._add(DictItem(text, space.space, key, value, owner=kind))

    def _read_instance(self, space: Namespace, keys: Iterable[str]) -> None:
        kind = type(space.value)
        if not isinstance(space.value, AROUND_DATA):  # Python's own code reads all around data
            is_loaded, is_asked = self._names.is_loaded_of(kind), self._names.is_asked_of(kind)
            keys = [key for key in keys if is_loaded(key) or is_asked(key, space.before[key])]
        for key in sorted(keys):
            self._add_key(space, key, f"{space.text}.{key}".lstrip("."))

    def _add_key(self, space: Namespace, key: str, text: str) -> None:
        space.done.add(key)
        self._add(DictItem(text, space.space, key, space.before[key]))

    def absent(self, reached: ReachableObjects) -> list[Absent]:
        """Names that code loads of each instance and that it lacks; all are noted in `reached`."""
        found: list[Absent] = []
        for kind, instances in self._instances.items():
            named = self._names.named_for(kind)
            missing: dict[frozenset[str], set[str]] = {}  # many instances have the same names
            for one in instances:
                has = frozenset(one.before)
                if has not in missing:
                    missing[has] = named - has
                found.append((one.text, cast("dict[str, Any]", one.space), missing[has]))
                reached.reads[id(one.space)] = named
                reached.kinds[id(one.space)] = kind
        return found

    def hiding(self) -> Iterator[DictItem]:
        """Places of what would hide what a class has from its bases."""
        for kind, known in self._classes.items():
            if is_library(kind.__module__):
                continue
            bases = [self._classes[base].done for base in kind.__mro__[1:] if base in self._classes]
            for key in sorted(set[str]().union(*bases) - known.before.keys()):
                yield DictItem(f"{kind.__name__}.{key}", vars(kind), key, MISSING, owner=kind)
