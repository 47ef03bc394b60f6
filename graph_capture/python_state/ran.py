"""Which code runs while a step is traced: what did not run has read nothing.

Names alone say too much: a method of a common name makes all that it could read seem read. A step
whose values are as they were takes the same way through the same code, so what other code could
read is no concern of its plan.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import graph

_BY_OTHER_THREADS = frozenset(
    id(function.__code__)
    for function in (
        threading.Thread.start,
        threading.Condition.notify,
        threading.Condition.wait,
        ThreadPoolExecutor.submit,
    )
)
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_LAYERS = os.path.join(_TORCH, "nn", "")
_OF_EACH_MODULE = os.path.join("modules", "module.py")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_DYNAMO = os.path.join(_TORCH, "_dynamo", "symbolic_convert.py")
"""It reads code without running it."""
_HOOKS_ARE_SET = (
    torch.Tensor.register_hook.__code__,
    graph.register_multi_grad_hook.__code__,
    graph.saved_tensors_hooks.__init__.__code__,
)
_HOOKS_OF_NODES = frozenset({"register_hook", "register_prehook"})
"""Methods that are not written in Python."""
_OPS_OF_TORCH = frozenset({"aten", "prims", "prim"})

Tracer = Callable[[FrameType, str, Any], None]


class CodeThatRan:
    """Code objects, by their identity: that compares faster than they do."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
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
        """Whether Python tells which code begins: not if a debugger or a coverage is told."""
        return sys.gettrace() in (None, self._note)

    @property
    def count(self) -> int:
        """How many have run so far."""
        return len(self._codes)

    def own_codes(self) -> list[CodeType]:
        """Code of neither torch, Python's own library nor ours, all of which write for others."""
        codes = list(self._codes.values())  # more may run meanwhile
        return [code for code in codes if not _writes_for_others(code)]

    def asks_identity(self) -> bool:
        """Whether code of the user's, or of torch's layers, asks if two objects are one.

        Whether one is None, or a constant, is no such question. True where nobody knows.
        """
        codes = list(self._codes.values())
        theirs = [code for code in codes if _is_of_layer(code)]
        return not self.is_all or any(map(_asks_identity, [*self.own_codes(), *theirs]))

    @contextlib.contextmanager
    def recorded(self) -> Generator[None]:
        """Note the Python code that this thread begins to run: forward's, and what follows it.

        What follows, a backward, is left out if it runs code of torch alone. A debugger, or a
        test's coverage, has the only place for that: then nothing is known.
        """
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
            if self._is_seen and self.may_run_in_backward():
                self._goes_on = True
                sys.settrace(self._note)

    @contextlib.contextmanager
    def told_to(self, begins: Callable[[CodeType], None]) -> Generator[None]:
        """Call this with each code that is noted, before it runs for the first time."""
        self._begins = begins
        try:
            yield
        finally:
            self._begins = None
            self.stop()

    def stop(self) -> None:
        """Note no more."""
        if sys.gettrace() is self._note:
            sys.settrace(None)
        elif self._goes_on:
            # Python drops a tracer at a stack that is too deep, and code may set its own.
            self._is_seen = False
        self._goes_on = False

    def may_run_in_backward(self) -> bool:
        """Whether backward may run code of the user's: hooks, and functions of autograd."""
        forwards = (getattr(kind.forward, "__code__", None) for kind in _functions_of_autograd())
        if any(code in self for code in (*_HOOKS_ARE_SET, *forwards)):
            return True
        return any(
            not _HOOKS_OF_NODES.isdisjoint(code.co_names)
            and not code.co_filename.startswith(_TORCH)
            for code in self._codes.values()
        )

    def _tracer(self) -> Tracer:
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


def _is_of_layer(code: CodeType) -> bool:
    """Whether it is of a layer of torch's, and not of the base class of all."""
    file = code.co_filename
    return file.startswith(_LAYERS) and not file.endswith(_OF_EACH_MODULE)


def _asks_identity(code: CodeType) -> bool:
    before = ""
    for one in dis.get_instructions(code):
        if one.opname == "IS_OP" and not before.startswith(("LOAD_CONST", "LOAD_GLOBAL")):
            return True
        before = one.opname if one.opname not in ("CACHE", "EXTENDED_ARG") else before
    return False


def _writes_for_others(code: CodeType) -> bool:
    file = code.co_filename
    is_standard = file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file
    is_of_dataclass = (file, code.co_name) == ("<string>", "__init__")
    return is_standard or is_of_dataclass or file.startswith((_TORCH, _OURS))


def _functions_of_autograd() -> Iterator[type[torch.autograd.Function]]:
    waiting = [torch.autograd.Function]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


def unrecorded(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an op, and note no code if it is torch's: to trace it takes thousands of calls."""
    tracer = sys.gettrace()
    if not hasattr(tracer, "is_ours") or op.namespace not in _OPS_OF_TORCH:
        return op(*args, **kwargs)
    sys.settrace(None)
    try:
        return op(*args, **kwargs)
    finally:
        sys.settrace(tracer)
