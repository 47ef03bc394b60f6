"""Work in a thread of its own that never keeps Ctrl-C waiting.

Solvers in C++ return to Python only when they are done. So they run in daemon threads, and
the caller waits in short spells: it hears Ctrl-C at once. It then stops the task, and all tasks
that this one began, and waits for their end. The same happens to what still runs when the
interpreter ends: a thread that came back from C++ during that would abort the process.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
SPELL_S = 0.05
STOPPING_S = 5.0
"""Longest wait for what was told to stop."""


class Task(Generic[T]):
    """One call of `work`, begun at once.

    Ctrl-C while it is waited for stops it, and so does an error in its `with` block: `stop` is
    called, if there is one. Each task that it began is stopped too, and it can begin no other.

    Raises
    ------
    KeyboardInterrupt : it would begin within a task that was stopped.
    """

    def __init__(self, work: Callable[[], T], stop: Callable[[], None] | None = None) -> None:
        self._work, self._stop = work, stop
        self._done: list[T] = []
        self._failed: list[BaseException] = []
        self._ended = threading.Event()
        self._is_stopped = False
        self._outer: Task[Any] | None = getattr(_here, "task", None)
        self._thread = threading.Thread(target=self._run, name="remat-solver", daemon=True)
        _running[self] = None
        if self._outer is not None and self._outer._is_stopped:
            del _running[self]
            raise KeyboardInterrupt
        self._thread.start()

    def _run(self) -> None:
        _here.task = self
        try:
            self._done.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._failed.append(error)
        finally:
            del _running[self]
            self._ended.set()

    def __enter__(self) -> Task[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stop()

    def wait(self) -> T:
        """What `work` returned; raises what it raised.

        Raises
        ------
        KeyboardInterrupt : on Ctrl-C, or the task was stopped.
        """
        try:
            while not self._ended.wait(SPELL_S):
                pass
        except BaseException:
            self.stop()
            raise
        if self._is_stopped:
            raise KeyboardInterrupt
        if self._failed:
            raise self._failed[0]
        return self._done[0]

    def stop(self) -> None:
        """Stop the work and what it began; wait for a while, unless nothing can be told to.

        It is told again in every spell, since a solver that is about to begin does not hear it.
        """
        until_s = time.monotonic() + STOPPING_S
        while not self._ended.is_set() and self._tell_to_stop():
            if self._ended.wait(min(SPELL_S, STOPPING_S)) or time.monotonic() > until_s:
                return

    def end_by(self, moment_s: float) -> None:
        """Stop the work and wait for the end of its thread, until that moment at most."""
        while self._thread.is_alive() and time.monotonic() < moment_s:
            self._tell_to_stop()
            self._thread.join(SPELL_S)

    def _tell_to_stop(self) -> bool:
        """Whether there was anything to tell."""
        self._is_stopped = True
        told = [task._tell_to_stop() for task in list(_running) if task._outer is self]
        if self._stop is not None:
            self._stop()
        return self._stop is not None or any(told)


_here = threading.local()
_running: dict[Task[Any], None] = {}


@atexit.register
def stop_all() -> None:
    """Stop what runs, and wait for its end: `STOPPING_S` at most for all tasks together."""
    moment_s = time.monotonic() + STOPPING_S
    for task in list(_running):
        task.end_by(moment_s)
