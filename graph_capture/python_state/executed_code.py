"""The names that all code in reach loads: of globals, of objects of each class, of anything."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import CheckpointFunction

from remat.graph_capture.python_state.module_hooks import Names, names_of
from remat.graph_capture.python_state.reachable_objects import (
    DATA,
    OF_DATA,
    RUN_BY_TORCH,
    STATE,
    is_installed,
    is_library,
    is_looked_into,
)
from remat.graph_capture.python_state.state_slots import PLAIN
from remat.graph_capture.torch_private.core import OpOverload

_OF_MODULES = frozenset(vars(nn.Module()))


class LoadedNames:
    def __init__(self, texts: set[str]) -> None:
        self.texts = texts  # that may name attributes
        self.others: set[str] = set(RUN_BY_TORCH)  # attributes of anything
        self.by_libraries: set[str] = set()  # attributes of anything, by libraries' methods
        self.global_names: set[str] = set()  # of modules
        # Names, and classes (None: any) whose attributes code may ask for by any name, since added.
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
        self._add_to(self.texts, texts)

    def add_method(self, kind: type, function: FunctionType) -> None:
        names = names_of(function.__code__)
        if kind not in self._own:
            self._own[kind] = set()
            for base in kind.__mro__[1:]:  # methods of heirs read the namespaces of their bases
                self._heirs.setdefault(base, []).append(kind)
        if is_looked_into(kind) and is_library(function.__module__):
            self._add_to(self._own[kind], names.own - DATA)  # data sets need the user's own code
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
        # What a method asks of its own object was noted for its class.
        if names.asks_others or (names.asks_own and function not in self._methods):
            self._add_asking(None)
        return names

    def _add_to(self, known: set[str], names: Iterable[str]) -> None:
        new = set(names) - known
        known |= new
        self.new += sorted(new)  # sorted, as a set of texts has another order in each process

    def _add_asking(self, kind: type | None) -> None:
        if kind not in self._asking:
            self._asking.add(kind)
            self.new_asking.append(kind)

    def is_loaded_of(self, kind: type) -> Callable[[str], bool]:
        """Whether code loads a name of objects of that class; methods of its bases do too."""
        sets = [self.others, self.texts]
        sets += [self._own[one] for one in self._related(kind) if one in self._own]
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
        """By a name that it puts together: of a method's own first argument, or of data."""
        is_own = not self._asking.isdisjoint(self._related(kind))
        holds_data = kind.__module__ in OF_DATA or dataclasses.is_dataclass(kind)
        is_asked = is_own or (None in self._asking and holds_data)
        is_any_kind = not is_installed(sys.modules.get(kind.__module__))

        def is_asked_for(name: str, value: Any) -> bool:
            is_out = name in _OF_MODULES or name.startswith("_remat_")
            # Of a library's objects only numbers and texts: the rest is seldom read so.
            return is_asked and not is_out and (is_any_kind or isinstance(value, PLAIN))

        return is_asked_for

    def named_for(self, kind: type) -> set[str]:
        """All that code itself names of objects of that class."""
        named = self.others.union(*(self._own.get(one, ()) for one in self._related(kind))) - STATE
        return {name for name in named if name[0] != "_"} if is_library(kind.__module__) else named

    def _related(self, kind: type) -> tuple[type, ...]:
        return (*kind.__mro__, *self._heirs.get(kind, ()))


def is_related(kind: type, asking: type | None) -> bool:
    """Whether methods of a class may be those of objects of `kind`; None: code of any class."""
    return asking is None or asking in kind.__mro__ or kind in asking.__mro__


_LETS_OTHERS_RUN = (
    threading.Thread.start, threading.Condition.notify, threading.Condition.wait,
    ThreadPoolExecutor.submit,
)  # fmt: skip
_BY_OTHER_THREADS = frozenset(id(function.__code__) for function in _LETS_OTHERS_RUN)
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_LAYERS = os.path.join(_TORCH, "nn", "")
_OF_EACH_MODULE = os.path.join("modules", "module.py")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_DYNAMO = os.path.join(_TORCH, "_dynamo", "symbolic_convert.py")  # it reads code without running it
_HOOKS_ARE_SET = (
    torch.Tensor.register_hook.__code__,
    graph.register_multi_grad_hook.__code__,
    graph.saved_tensors_hooks.__init__.__code__,
)
_HOOKS_OF_NODES = frozenset({"register_hook", "register_prehook"})  # methods not written in Python
_OPS_OF_TORCH = frozenset({"aten", "prims", "prim"})

_Tracer = Callable[[FrameType, str, Any], None]


class ExecutedCode:
    """The code that runs while a step is traced: what did not run has read nothing."""

    # By what ran: names alone make all that a common method's name could read seem read.
    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}  # by identity, which compares faster
        self._is_seen, self._goes_on = True, False
        self._begins: Callable[[CodeType], None] | None = None
        self._note = self._tracer()

    def __contains__(self, code: CodeType | None) -> bool:
        return id(code) in self._codes

    @property
    def is_all(self) -> bool:
        """Whether this is all code that ran, as far as can be known."""
        return self._is_seen and not any(map(runs_unseen, list(self._codes.values())))

    @property
    def can_be_seen(self) -> bool:
        return sys.gettrace() in (None, self._note)  # a debugger or coverage has the only place

    def own_codes(self) -> list[CodeType]:
        """Code of neither torch, Python's own library nor ours, all of which write for others."""
        codes = list(self._codes.values())  # more may run meanwhile
        return [code for code in codes if not _writes_for_others(code)]

    def asks_identity(self) -> bool:
        """Whether code of the user's, or of torch's layers, may ask if two objects are one."""
        codes = (c for c in list(self._codes.values()) if c.co_filename.startswith(_LAYERS))
        # Code of the base class of all layers is not theirs.
        theirs = (c for c in codes if not c.co_filename.endswith(_OF_EACH_MODULE))
        return not self.is_all or any(map(_asks_identity, [*self.own_codes(), *theirs]))

    @contextlib.contextmanager
    def recorded(self) -> Generator[None]:
        """Note the Python code that this thread begins to run: forward's, and what follows it."""
        self.stop()
        if not self.can_be_seen:
            self._is_seen = False
            yield
            return
        sys.settrace(self._note)
        try:
            yield
        finally:
            self._goes_on = True
            self.stop()
            # A backward follows, which is left out if it runs code of torch alone.
            if self._is_seen and self.may_run_in_backward():
                self._goes_on = True
                sys.settrace(self._note)

    @contextlib.contextmanager
    def told_to(self, begins: Callable[[CodeType], None]) -> Generator[None]:
        self._begins = begins
        try:
            yield
        finally:
            self._begins = None
            self.stop()

    def stop(self) -> None:
        if sys.gettrace() is self._note:
            sys.settrace(None)
        elif self._goes_on:
            self._is_seen = False  # a deep stack drops a tracer, and code may set its own
        self._goes_on = False

    def may_run_in_backward(self) -> bool:
        forwards = (getattr(kind.forward, "__code__", None) for kind in _functions_of_autograd())
        if any(code in self for code in (*_HOOKS_ARE_SET, *forwards)):
            return True
        # These methods are not written in Python, so that only their names tell.
        others = (c for c in self._codes.values() if not c.co_filename.startswith(_TORCH))
        return not all(_HOOKS_OF_NODES.isdisjoint(code.co_names) for code in others)

    def _tracer(self) -> _Tracer:
        codes = self._codes

        # Called for each frame; as it returns None, for no line in it.
        def note(frame: FrameType, event: str, arg: Any) -> None:
            code = frame.f_code
            if id(code) not in codes:
                codes[id(code)] = code
                if self._begins is not None:
                    self._begins(code)

        note.is_ours = True  # pyright: ignore[reportFunctionMemberAccess]
        return note


def runs_unseen(code: CodeType) -> bool:
    """Whether code lets other threads run code, or takes code apart that it does not run."""
    return id(code) in _BY_OTHER_THREADS or code.co_filename == _DYNAMO


def _asks_identity(code: CodeType) -> bool:
    before = ""
    for one in dis.get_instructions(code):
        # `is None`, or `is` beside another constant, does not ask about two objects.
        if one.opname == "IS_OP" and not before.startswith(("LOAD_CONST", "LOAD_GLOBAL")):
            return True
        before = one.opname if one.opname not in ("CACHE", "EXTENDED_ARG") else before
    return False


def _writes_for_others(code: CodeType) -> bool:
    file = code.co_filename
    is_standard = file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file
    # dataclasses make theirs from a text
    is_of_dataclass = (file, code.co_name) == ("<string>", "__init__")
    return is_standard or is_of_dataclass or file.startswith((_TORCH, _OURS))


def _functions_of_autograd() -> Iterator[type[torch.autograd.Function]]:
    waiting = [torch.autograd.Function]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


def functions_of_users() -> Iterator[type[torch.autograd.Function]]:
    ours = ("torch.", "remat.")
    return (kind for kind in _functions_of_autograd() if not str(kind.__module__).startswith(ours))


def codes_of_function(kind: type[torch.autograd.Function]) -> Iterator[CodeType]:
    """Of the methods that a user writes."""
    for name in ("forward", "setup_context", "backward", "vjp"):
        function = inspect.unwrap(getattr(kind, name))
        if isinstance(function, FunctionType) and function.__module__ != "torch.autograd.function":
            yield function.__code__


def function_that_failed(error: BaseException | None) -> frozenset[type[torch.autograd.Function]]:
    """The user's function, or torch's for checkpoints, in whose code a trace has failed; empty
    where it has failed elsewhere."""
    kinds = (*functions_of_users(), CheckpointFunction)
    of_code = {code: kind for kind in kinds for code in codes_of_function(kind)}
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_code in of_code:
                return frozenset({of_code[frame.f_code]})
        error = error.__cause__
    return frozenset()


def without_recording(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    tracer = sys.gettrace()
    if not hasattr(tracer, "is_ours") or op.namespace not in _OPS_OF_TORCH:
        return op(*args, **kwargs)
    sys.settrace(None)  # to trace one of torch's ops takes thousands of calls
    try:
        return op(*args, **kwargs)
    finally:
        sys.settrace(tracer)
