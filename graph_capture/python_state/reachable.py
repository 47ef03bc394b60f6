"""What code reaches: places that forward and the loss may read, found without running them.

From the modules of a model and its loss, the walk follows what their code names: attributes,
globals, closures, defaults, and from those on. Code of torch, NumPy and the standard library is
not followed; of their modules, only what forward itself loads is of interest.
"""

from __future__ import annotations

import functools
import operator
import os
import weakref
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from remat.graph_capture.python_state.code_names import Names
from remat.graph_capture.python_state.hidden import (
    GENERATORS,
    asked_of_torch,
    environment,
    hidden,
    stream,
)
from remat.graph_capture.python_state.library_objects import (
    NUMBERS_OF_C,
    attributes_of,
    is_looked_into,
)
from remat.graph_capture.python_state.loaded_names import LoadedNames
from remat.graph_capture.python_state.module_hooks import (
    BACKWARD_HOOKS,
    ModuleHooks,
    hooked_modules,
    place_of_hooks,
)
from remat.graph_capture.python_state.places import (
    CONTAINERS,
    MISSING,
    PLAIN,
    Cell,
    Contents,
    Entry,
    Slot,
    copied,
)
from remat.graph_capture.python_state.ran import CodeThatRan
from remat.graph_capture.python_state.reached import (
    AROUND_DATA,
    LONGEST_NAME,
    NOT_RUN,
    OF_DATA,
    STATE,
    Instance,
    LruCache,
    Reached,
    functions_of,
    is_library,
    modules_of,
    named_state,
    slot_names,
)

_BY_TEXT = {"globals", "eval"}
"""Functions that find what a text names among the globals."""
_HAS_STATE = STATE.union(BACKWARD_HOOKS)
_NAMES_OF_ATTRIBUTES = (operator.attrgetter, operator.methodcaller)


class Walk:
    """One walk from a model and its loss. `found` is filled when it is made.

    Parameters
    ----------
    loss_fn : or other functions that are called.
    ran : follow this code alone; left at None, all code.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        ran: CodeThatRan | None = None,
    ) -> None:
        self.found = Reached()
        self._ran = ran
        self._seen: dict[int, Any] = {}
        self._entries: set[tuple[int, Any]] = set()
        self._instances: list[Instance] = []
        self._classes: dict[type, set[str]] = {}
        self._modules: dict[int, tuple[ModuleType, set[str]]] = {}
        self._called: set[type] = set()
        self._names = LoadedNames(self.found.texts)
        steps = [one for one in (model, loss_fn) if isinstance(one, nn.Module)]
        self._of_step = {id(module) for one in steps for module in one.modules()}
        for path, module in model.named_modules():
            self._visit(module, path)
        self._visit(loss_fn, "loss_fn")
        for path, module in hooked_modules(model, loss_fn):
            self._visit_hooks(place_of_hooks(path, module))
        for path, tensor in (pair for one in steps for pair in named_state(one)):
            self._visit(tensor, path)
        self._until_nothing_is_new()
        self._watch_absent()
        self._watch_environment()
        self.found.of_tensors |= self._names.others | self.found.texts

    def _until_nothing_is_new(self) -> None:
        """Names that code loads make more code reachable, which loads more names."""
        size = -1
        while size != (now := self._size()):
            size = now
            for kind in list(self._classes):
                self._read_class(kind)
            for instance in list(self._instances):
                self._read_instance(instance)
            for module, done in list(self._modules.values()):
                self._read_module(module, done)

    def _size(self) -> tuple[int, ...]:
        return len(self._seen), len(self._entries), len(self._names), len(self._instances)

    def _visit(self, value: Any, text: str) -> None:
        """Follow a value, once."""
        if isinstance(value, str):
            self._add_name(value)
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        if isinstance(value, Tensor) and not attributes_of(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._instances.append(Instance(text, value, attributes_of(value)))
        elif isinstance(value, FunctionType):
            self._visit_function(value, text)
        elif isinstance(value, MethodType):
            self._visit_method(value, text)
        elif isinstance(value, LruCache):
            self.found.caches.append(value)
            self._note_hit(value)
            self._visit(value.__wrapped__, text)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, text)
        elif isinstance(value, type):
            self._called.add(value)
            self._visit_class(value)
            self._visit_class(type(value))
        elif isinstance(value, ModuleType):
            if not is_library(value.__name__):
                self._modules[id(value)] = value, set()
        elif isinstance(value, (tuple, frozenset, *CONTAINERS)):
            self._visit_items(value, text)
        elif isinstance(value, weakref.ref):
            self._visit(value(), text)
        elif isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            self._visit(vars(value)["data"], text)
        elif isinstance(value, _NAMES_OF_ATTRIBUTES):
            self._visit(value.__reduce__()[1], text)
        elif isinstance(value, GENERATORS):
            self._add_stream(text, value)
        elif self._may_hide(value) and (place := hidden(text, value)):
            self.found.places.append(place)
        elif isinstance(value, nn.Module) and id(value) not in self._of_step:
            self._visit_other_module(value, text)
        elif isinstance(value, BuiltinFunctionType):
            # A method such as `table.get`, of the object that it was taken from.
            if not isinstance(value.__self__, ModuleType):
                self._visit(value.__self__, text)
        else:
            self._visit_instance(value, text)

    @staticmethod
    def _may_hide(value: Any) -> bool:
        """Whether it is no object of a user's class, unless that is a structure of C."""
        return is_library(type(value).__module__) or isinstance(value, NUMBERS_OF_C)

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
        self._add_entry(f"{text}.training", space, "training")
        for table in ("_parameters", "_buffers"):
            for key in space[table]:
                self._add_entry(f"{text}.{key}", space[table], key)
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
            # Of an object of torch, as of spectral norm, the code is not read: all may count.
            space = getattr(hook.function, "__dict__", {})
            for key in space:
                self._add_entry(f"{key} of the {place.text}", space, key)

    def _add_name(self, text: str) -> None:
        """`getattr(self, self.key)` reads the attribute that a text in reach names."""
        if len(text) < LONGEST_NAME:
            self.found.texts.update(text.split("."))

    def _visit_function(self, function: FunctionType, text: str) -> None:
        if is_library(function.__module__):
            return
        # A function is an object too, which may keep something between calls.
        self._instances.append(Instance(function.__qualname__, function, vars(function)))
        if not self._is_followed(function):
            return
        names = self._names.add(function)
        for module in modules_of(function, names):
            self._visit(module, module.__name__)
        self._note_stores(function, names)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if name == "__class__":
                continue  # what `super()` needs
            self._add_cell(f"variable {name} of {function.__qualname__}", cell)
        # A notebook that loads edited files anew puts other code into the functions that are there.
        self._add_slot(f"the code of {function.__qualname__}", function, "__code__")
        for key in ("__defaults__", "__kwdefaults__"):
            if getattr(function, key):
                self._add_slot(f"a default of {function.__qualname__}", function, key)
        by_text = names.others if names.global_names & _BY_TEXT else set[str]()
        for name in sorted((names.global_names | by_text) & function.__globals__.keys()):
            where = function.__globals__.get("__name__", "its file")
            self._add_entry(f"global {name} of {where}", function.__globals__, name)

    def _is_followed(self, function: FunctionType) -> bool:
        has_run = self._ran is None or function.__code__ in self._ran
        return has_run or any(function is one for one in self.found.behind_caches)

    def _note_hit(self, cache: Any) -> None:
        function = cache.__wrapped__
        if isinstance(function, FunctionType) and not self._is_followed(function):
            self.found.behind_caches.append(function)

    def _note_stores(self, function: FunctionType, names: Names) -> None:
        for name, line in names.stored.items():
            place = f"{os.path.relpath(function.__code__.co_filename)}:{line}"
            self.found.stores.setdefault(name, place)

    def _visit_items(self, value: Any, text: str) -> None:
        if isinstance(value, CONTAINERS):
            self.found.places.append(Contents(f"an item of {text}", value, copied(value)))
            value = copied(value)
        if isinstance(value, dict):
            for key, item in value.items():
                self._visit(key, text)
                self._visit(item, f"{text}[{key!r}]")
        elif not isinstance(value, np.ndarray):
            for i, item in enumerate(value):
                self._visit(item, f"{text}[{i}]")

    def _visit_instance(self, value: Any, text: str) -> None:
        kind = type(value)
        is_followed = isinstance(value, nn.Module) or kind.__module__ in OF_DATA
        if is_library(kind.__module__) and not is_followed and not is_looked_into(kind):
            return
        self._visit_class(kind)
        space = getattr(value, "__dict__", None)
        if isinstance(space, dict):
            self._instances.append(Instance(text, value, space))
        for name in slot_names(kind):
            if hasattr(value, name):
                self._add_slot(f"{text}.{name}".lstrip("."), value, name)

    def _visit_class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if owner in (object, nn.Module) or owner in self._classes:
                continue
            is_read = issubclass(owner, nn.Module) or is_looked_into(owner)
            if is_read or not is_library(owner.__module__):
                self._classes[owner] = set()

    def _read_class(self, kind: type) -> None:
        """The methods and attributes of a class that some code names."""
        space, done = vars(kind), self._classes[kind]
        is_named = self._names.is_loaded_of(kind)
        for key in sorted(space.keys() - done):
            is_special = key.startswith("__") and key.endswith("__")
            if not is_named(key) and not (is_special and self._is_run(kind, key)):
                continue
            done.add(key)
            functions = list(functions_of(space[key]))
            for function in functions:
                self._read_method(kind, function)
            if functions and is_looked_into(kind):
                continue  # its methods are torch's or Python's own
            if functions or not is_special:
                self._add_entry(f"{kind.__name__}.{key}", space, key, owner=kind)

    def _is_run(self, kind: type, special: str) -> bool:
        """Whether forward may run a method that no code names: a constructor, if the class is."""
        if special in ("__init__", "__new__", "__post_init__"):
            return any(kind in called.__mro__ for called in self._called)
        return special not in NOT_RUN

    def _read_method(self, kind: type, function: FunctionType) -> None:
        if self._is_followed(function):
            self._names.add_method(kind, function)
        self._visit(function, function.__qualname__)

    def _read_instance(self, instance: Instance) -> None:
        kind, space = type(instance.value), instance.space
        keys = space.keys() - instance.done
        if not isinstance(instance.value, AROUND_DATA):
            is_loaded, is_asked = self._names.is_loaded_of(kind), self._names.is_asked_of(kind)
            keys = [key for key in keys if is_loaded(key) or is_asked(key, space[key])]
        for key in sorted(keys):
            instance.done.add(key)
            self._add_entry(f"{instance.text}.{key}".lstrip("."), space, key)

    def _read_module(self, module: ModuleType, done: set[str]) -> None:
        for key in sorted((vars(module).keys() & self._names.others) - done):
            done.add(key)
            self._add_entry(f"{key} of {module.__name__}", vars(module), key)

    def _watch_absent(self) -> None:
        by_kind = {
            kind: self._names.named_for(kind) for kind in {type(i.value) for i in self._instances}
        }
        for one in self._instances:
            named = by_kind[type(one.value)]
            self.found.reads[id(one.space)] = named
            self.found.kinds[id(one.space)] = type(one.value)
            self.found.watched.append((one.text, one.space, named - one.space.keys()))
        for kind in self._classes:
            self._watch_inherited(kind)

    def _watch_inherited(self, kind: type) -> None:
        """What a class has from its bases may be hidden by what it is given itself."""
        if is_library(kind.__module__):
            return
        space = vars(kind)
        bases = [self._classes[base] for base in kind.__mro__[1:] if base in self._classes]
        for key in sorted(set[str]().union(*bases) - space.keys()):
            text = f"{kind.__name__}.{key}"
            self.found.places.append(Entry(text, space, key, MISSING, owner=kind))

    def _watch_environment(self) -> None:
        """Torch's settings that code asks for, and variables that it may name, in capitals."""
        self.found.places += asked_of_torch(self._names.others)
        if self._names.global_names.union(self._names.others).isdisjoint(("environ", "getenv")):
            return
        texts = self._names.others | self.found.texts
        names = tuple(sorted(name for name in texts if name.isupper()))
        self.found.places.append(environment(names))

    def _add_stream(self, text: str, value: Any) -> None:
        found = stream(text, value)
        if found is not None:
            self.found.streams.append(found)

    def _add_entry(self, text: str, space: Any, key: Any, owner: Any = None) -> None:
        if (id(owner or space), key) in self._entries:
            return
        self._entries.add((id(owner or space), key))
        value = space[key]
        self.found.places.append(Entry(text, space, key, value, owner))
        self._visit(value, text)

    def _add_cell(self, text: str, cell: Any) -> None:
        if (id(cell), None) in self._entries:
            return
        self._entries.add((id(cell), None))
        place = Cell(text, cell, MISSING)
        value = place.now()
        if value is not MISSING:
            self.found.places.append(Cell(text, cell, value))
            self._visit(value, text)

    def _add_slot(self, text: str, owner: Any, key: str) -> None:
        if (id(owner), key) in self._entries:
            return
        self._entries.add((id(owner), key))
        value = getattr(owner, key)
        self.found.places.append(Slot(text, owner, key, value))
        self._visit(value, text)
