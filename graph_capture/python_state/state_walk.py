"""What code reaches: places that forward and the loss may read, found without running them.

The walk follows what code of a model names: attributes, globals, closures, defaults. Code of torch,
NumPy and the standard library is not followed; their modules count as forward itself loads them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from remat.graph_capture.python_state.executed_code import ExecutedCode, LoadedNames
from remat.graph_capture.python_state.module_hooks import (
    BACKWARD_HOOKS,
    ModuleHooks,
    Names,
    hooked_modules,
    place_of_hooks,
)
from remat.graph_capture.python_state.namespaces import Namespaces
from remat.graph_capture.python_state.reachable_objects import (
    LONGEST_NAME,
    OF_DATA,
    STATE,
    Absent,
    LruCache,
    ReachableObjects,
    attributes_of,
    distinct_state,
    is_installed,
    is_library,
    is_looked_into,
    is_users_module,
    modules_of,
    slot_names,
)
from remat.graph_capture.python_state.state_slots import (
    CONTAINERS,
    GENERATORS,
    MISSING,
    NUMBERS_OF_C,
    PLAIN,
    ClosureCell,
    ContainerItems,
    DictItem,
    OpaqueState,
    SettingsBefore,
    SlotAttr,
    StateSlot,
    copied,
    opaque_state,
    stream,
)

_BY_TEXT = {"globals", "eval"}  # functions that find what a text names among the globals
MOST_PLACES = 30_000  # a walk ends when it has found more: all that is compared takes a second then
_LOG = logging.getLogger(__name__)
_HAS_STATE = STATE.union(BACKWARD_HOOKS)
_NAMES_OF_ATTRIBUTES = (operator.attrgetter, operator.methodcaller)


class StateWalk:
    """One walk from a model and its loss, breadth first; `ran`: only of this code. `live`: not of
    this, which steps run as it is."""

    def __init__(
        self, model: nn.Module, loss_fn: Any, ran: ExecutedCode | None = None,
        live: frozenset[CodeType] = frozenset(),
    ) -> None:  # fmt: skip
        self.found = ReachableObjects()  # what it has come by so far
        self.ran, self._live = ran, live
        self._in_library = False  # whether what is followed now is an installed library's
        self._queue: deque[tuple[Any, str]] = deque()  # the farthest are missing, if too many
        self._seen: dict[int, Any] = {}  # with the objects, whose identities stay theirs so
        self._entries: set[tuple[int, Any]] = set()
        # Functions, by the identity of code that has not run yet.
        self._waiting: dict[int, list[tuple[FunctionType, type | None]]] = {}
        self._names = LoadedNames(self.found.texts)
        self._spaces = Namespaces(self._names, self._add_entry, self._read_method)
        self._settings = SettingsBefore()
        steps = [one for one in (model, loss_fn) if isinstance(one, nn.Module)]
        self._of_step = {id(module) for one in steps for module in one.modules()}
        for path, module in model.named_modules():
            self._visit(module, path)
        self._visit(loss_fn, "loss_fn")
        for path, module in hooked_modules(model, loss_fn):
            self._visit_hooks(place_of_hooks(path, module))
        for path, tensor in (pair for one in steps for pair in distinct_state(one)):
            self._visit(tensor, path)
        self._go_on()

    @property
    def size(self) -> tuple[int, ...]:
        return len(self._seen), len(self._entries), len(self._names)

    def begins(self, code: CodeType) -> None:
        """Follow code that is about to run: what it may read is as it was before."""
        if id(code) in self._waiting:
            self._read_waiting([id(code)])

    def follow_executed(self) -> None:
        waiting = self._waiting.items()
        self._read_waiting([key for key, ((one, _), *_) in waiting if self._is_followed(one)])

    def follow_all(self) -> None:
        self.ran = None
        self._read_waiting(list(self._waiting))

    def _read_waiting(self, codes: Iterable[int]) -> None:
        for code in codes:
            for function, kind in self._waiting.pop(code):
                self._read_function(function, kind)
        self._go_on()

    def _is_followed(self, function: FunctionType) -> bool:
        return self.ran is None or function.__code__ in self.ran

    def behind_caches(self) -> list[FunctionType]:
        """Functions that did not run, as a cache had their results."""
        waiting = {id(one) for some in self._waiting.values() for one, _ in some}
        hit = [one for one, before in self.found.caches if one.cache_info().hits != before.hits]
        return [one.__wrapped__ for one in hit if id(one.__wrapped__) in waiting]

    def _go_on(self) -> None:
        # Names that code loads make more code reachable, which loads more names.
        while self._queue or self._names.new or self._names.new_asking:
            if len(self.found.places) > MOST_PLACES:
                n, text = len(self._queue), self._queue[0][1] if self._queue else "names alone"
                _LOG.debug("%d objects in reach are not walked, beginning with %s", n, text)
                for rest in (self._queue, self._names.new, self._names.new_asking):
                    rest.clear()
            elif self._queue:
                value, text = self._queue.popleft()
                with self._within(value):
                    self._follow_kind(value, text)
            elif self._names.new:
                self._spaces.read_named(self._names.new.pop())
            else:
                self._spaces.read_asking(self._names.new_asking.pop())

    def _visit(self, value: Any, text: str) -> None:
        # `getattr(self, self.key)` reads what a text in reach names; `attrgetter` takes several.
        if isinstance(value, str) and len(value) < LONGEST_NAME:
            self._names.add_texts(value.split("."))
        if not self._in_library:
            self.found.of_libraries.discard(id(value))  # the user's code reaches it too
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        if isinstance(value, Tensor) and not attributes_of(value):
            return
        self._seen[id(value)] = value
        if self._in_library and not is_users_module(str(type(value).__module__)):
            self.found.of_libraries.add(id(value))
        self._queue.append((value, text))

    @contextlib.contextmanager
    def _within(self, holder: Any) -> Generator[None]:
        """What is visited meanwhile is an installed library's if `holder` is."""
        before, self._in_library = self._in_library, self.found.is_of_library(holder)
        try:
            yield
        finally:
            self._in_library = before

    def _follow_kind(self, value: Any, text: str) -> None:
        if isinstance(value, Tensor):
            self._spaces.add_instance(text, value, attributes_of(value))
        elif isinstance(value, FunctionType):
            if not is_library(value.__module__):  # a function may keep something in attributes
                self._spaces.add_instance(value.__qualname__, value, vars(value))
                self._read_when_run(value, None)
        elif isinstance(value, MethodType):
            self._visit_method(value, text)
        elif isinstance(value, LruCache):
            self.found.caches.append((value, value.cache_info()))
            self._visit(value.__wrapped__, text)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, text)
        elif isinstance(value, type):
            self._spaces.add_class(value)
            self._spaces.add_class(type(value))
            self._spaces.call(value)
        elif isinstance(value, ModuleType):
            if not is_library(value.__name__):
                self._holds(vars(value), is_installed(value))
                self._spaces.add_module(value)
        elif isinstance(value, (tuple, frozenset, *CONTAINERS)):
            self._visit_items(value, text)
        elif isinstance(value, weakref.ref):
            self._visit(value(), text)
        elif isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            self._visit(vars(value)["data"], text)
        elif isinstance(value, _NAMES_OF_ATTRIBUTES):
            self._visit(value.__reduce__()[1], text)  # they show their names in no attribute
        elif isinstance(value, GENERATORS):
            if (found := stream(text, value)) is not None:
                self.found.streams.append(found)
        # A user's class shows its state in attributes, unless it is a structure of C.
        elif (is_library(type(value).__module__) or isinstance(value, NUMBERS_OF_C)) and (
            place := opaque_state(text, value)
        ):
            self.found.places.append(place)
        elif isinstance(value, nn.Module) and id(value) not in self._of_step:
            self._visit_other_module(value, text)
        elif isinstance(value, BuiltinFunctionType):
            if not isinstance(value.__self__, ModuleType):  # such as `table.get`, of a table
                self._visit(value.__self__, text)
        else:
            self._visit_instance(value, text)

    def _visit_method(self, method: MethodType, text: str) -> None:
        kind, function = type(method.__self__), method.__func__
        if isinstance(function, FunctionType) and is_looked_into(kind):
            self._read_method(kind, function)
        self._visit(function, text)
        self._visit(method.__self__, text)

    def _visit_other_module(self, module: nn.Module, text: str) -> None:
        """Follow one that is no submodule, and all that it has: no other guard looks at it."""
        self._visit_instance(module, text)
        space = vars(module)
        if not space.keys() >= _HAS_STATE:
            return  # a ScriptModule keeps it elsewhere
        self._add_entry(DictItem(f"{text}.training", space, "training", module.training))
        for table in ("_parameters", "_buffers"):
            for key, value in space[table].items():
                self._add_entry(DictItem(f"{text}.{key}", space[table], key, value))
        for table in ("_modules", *BACKWARD_HOOKS):
            self._visit_items(space[table], text if table == "_modules" else f"{text}.{table}")
        hooks = place_of_hooks(text, module)
        self.found.places.append(hooks)
        for hook in hooks.value:
            self._visit(hook.function, hooks.text)

    def _visit_hooks(self, place: ModuleHooks) -> None:
        if not place.value:
            return
        self.found.places.append(place)
        for hook in place.value:
            self._visit(hook.function, place.text)
            if isinstance(hook.function, FunctionType):
                continue
            space = getattr(hook.function, "__dict__", {})  # code of torch's is not read: all count
            for key, value in space.items():
                self._add_entry(DictItem(f"{key} of the {place.text}", space, key, value))

    def _read_function(self, function: FunctionType, kind: type | None) -> None:
        """As a method of a class, or with all that it has at hand."""
        if function.__code__ in self._live:
            return
        if kind is not None:
            self._names.add_method(kind, function)
            return
        names = self._names.add(function)
        self.found.functions += 1
        with self._within(function):
            self._read_places(function, names)

    def _read_places(self, function: FunctionType, names: Names) -> None:
        for module in modules_of(function, names):
            self._visit(module, module.__name__)
        for name, line in names.stored.items():
            place = f"{os.path.relpath(function.__code__.co_filename)}:{line}"
            self.found.stores.setdefault(name, place)
        code, cells = function.__code__, function.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            text = f"variable {name} of {function.__qualname__}"
            value = ClosureCell(text, cell, MISSING).now()
            # `__class__` is what `super()` needs.
            if name != "__class__" and value is not MISSING and self._is_new(cell, None):
                self.found.places.append(ClosureCell(text, cell, value))
                self._holds(cell, self._in_library)
                self._visit(value, text)
        # A notebook that loads edited files anew puts other code into the functions that are there.
        self._add_slot(f"the code of {function.__qualname__}", function, "__code__")
        for key in ("__defaults__", "__kwdefaults__"):
            if getattr(function, key):
                self._add_slot(f"a default of {function.__qualname__}", function, key)
        # `globals` and `eval` find what a text names: it may be any name that is read.
        by_text = names.others if names.global_names & _BY_TEXT else set[str]()
        space = function.__globals__
        where = space.get("__name__", "its file")
        self._holds(space, self._in_library)
        before = self._spaces.as_before(space)
        for name in sorted((names.global_names | by_text) & before.keys()):
            self._add_entry(DictItem(f"global {name} of {where}", space, name, before[name]))

    def _visit_items(self, value: Any, text: str) -> None:
        if isinstance(value, CONTAINERS):
            self.found.places.append(ContainerItems(f"an item of {text}", value, copied(value)))
            value = copied(value)  # by the copy: a user's subclass may iterate in its own way
        if isinstance(value, dict):
            for key, item in value.items():
                self._visit(key, text)
                self._visit(item, f"{text}[{_key_text(key)}]")
        elif not isinstance(value, np.ndarray):
            for i, item in enumerate(value):
                self._visit(item, f"{text}[{i}]")

    def _visit_instance(self, value: Any, text: str) -> None:
        kind = type(value)
        is_followed = isinstance(value, nn.Module) or kind.__module__ in OF_DATA
        if is_library(kind.__module__) and not is_followed and not is_looked_into(kind):
            return
        self._spaces.add_class(kind)
        space = getattr(value, "__dict__", None)
        if isinstance(space, dict):
            self._holds(space, self._in_library)
            self._spaces.add_instance(text, value, cast("dict[str, Any]", space))
        for name in slot_names(kind):
            if hasattr(value, name):
                self._add_slot(f"{text}.{name}".lstrip("."), value, name)

    def _read_method(self, kind: type, function: FunctionType) -> None:
        self._read_when_run(function, kind)
        self._visit(function, function.__qualname__)

    def _read_when_run(self, function: FunctionType, kind: type | None) -> None:
        if self._is_followed(function):
            self._read_function(function, kind)
        else:
            self._waiting.setdefault(id(function.__code__), []).append((function, kind))

    def of_tensors(self) -> set[str]:
        return self._names.others | self.found.texts

    def absent(self) -> list[Absent]:
        return self._spaces.absent(self.found)

    def all_places(self) -> Iterator[StateSlot | OpaqueState]:
        """Those found, what would hide what a class has from its bases, and settings asked for."""
        yield from self.found.places
        yield from self._spaces.hiding()
        names = self._names
        yield from self._settings.asked(names.global_names, names.others, names.texts)

    def _holds(self, holder: Any, of_library: bool) -> None:
        (self.found.of_libraries.add if of_library else self.found.of_libraries.discard)(id(holder))

    def _is_new(self, holder: Any, key: Any) -> bool:
        is_new = (id(holder), key) not in self._entries
        self._entries.add((id(holder), key))
        return is_new

    def _add_entry(self, place: DictItem) -> None:
        holder = place.space if place.owner is None else place.owner  # each look makes another view
        if self._is_new(holder, place.key):
            self.found.places.append(place)
            with self._within(holder):
                self._visit(place.value, place.text)

    def _add_slot(self, text: str, owner: Any, key: str) -> None:
        if self._is_new(owner, key):
            value = getattr(owner, key)
            self.found.places.append(SlotAttr(text, owner, key, value))
            self._visit(value, text)


def _key_text(key: Any) -> str:
    parts = key if isinstance(key, tuple) else (key,)  # no method of the user's is run for a text
    return repr(key) if all(isinstance(one, PLAIN) for one in parts) else type(key).__name__
