"""What is told when an object has ended, by C code alone.

Python raises Ctrl-C between two of its bytecodes. It drops what a callback raises, so a callback
that is written in Python may end before it has closed or noted anything. The callbacks here are
methods of C: they put the fact on a queue, and another thread, where Ctrl-C is never heard, or a
later call does the rest.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Fact = TypeVar("Fact")


class Ending(weakref.ref[Any], Generic[Fact]):
    """Calls `hear`, a method of C, with itself when `thing` has ended; it has to live until then.

    Attributes
    ----------
    fact : what it has to tell.
    """

    fact: Fact

    def __new__(cls, thing: Any, hear: Callable[[Any], Any], fact: Fact) -> Ending[Fact]:
        """A weak reference with a fact."""
        self = super().__new__(cls, thing, hear)
        self.fact = fact
        return self

    def __init__(self, thing: Any, hear: Callable[[Any], Any], fact: Fact) -> None:
        """As `weakref.ref` takes them, which is told of no fact."""
        super().__init__(thing, hear)  # pyright: ignore[reportCallIssue]


class Closer:
    """Closes the descriptor of each object that has ended, in a thread of its own."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Ending[int] | None] = queue.SimpleQueue()
        self._open: dict[int, Ending[int]] = {}
        self._thread = threading.Thread(target=self._run, name="remat-closing", daemon=True)
        self._thread.start()

    def watch(self, thing: Any, descriptor: int) -> None:
        """Close `descriptor` once `thing` has ended; at the end of the process the system does."""
        ending = Ending(thing, self._ended.put, descriptor)
        self._open[id(ending)] = ending

    def end(self) -> None:
        """Close those whose objects have ended by now, and end the thread."""
        self._ended.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ending := self._ended.get()) is not None:
            os.close(ending.fact)
            del self._open[id(ending)], ending


_closers: list[Closer] = []
_starting = threading.Lock()


def closer() -> Closer:
    """The one of this process."""
    with _starting:
        if not _closers:
            _closers.append(Closer())
        return _closers[0]


def _end() -> None:
    """What ends later, in another function of `atexit`, the system closes."""
    for one in _closers:
        one.end()


def _forget() -> None:
    """A forked process has the thread of its parent in name only."""
    global _starting
    _starting = threading.Lock()
    _closers.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)
atexit.register(_end)
