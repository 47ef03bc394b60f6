"""Work in a thread of its own that never keeps Ctrl-C waiting.

Solvers in C++ return to Python only when they are done. So they run in daemon threads, and
whoever waits does so in short spells: an interrupt is heard at once. A solver that can be
stopped is then stopped and waited for, as a thread still in CP-SAT would abort the
interpreter at its end; another is left behind and ends at its own time limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
SPELL_S = 0.05
STOPPING_S = 5.0
"""Longest wait for a solver that was told to stop."""


class Task(Generic[T]):
    """One call of `work`, begun at once; an interrupt while waiting for it calls `stop`."""

    def __init__(self, work: Callable[[], T], stop: Callable[[], None] | None = None) -> None:
        self._work, self._stop = work, stop
        self._done: list[T] = []
        self._failed: list[BaseException] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="remat-solver", daemon=True).start()

    def _run(self) -> None:
        try:
            self._done.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._failed.append(error)
        finally:
            self._ended.set()

    def wait(self) -> T:
        """What `work` returned; raises what it raised."""
        try:
            while not self._ended.wait(SPELL_S):
                pass
        except KeyboardInterrupt:
            if self._stop is not None:
                self._stop()
                self._ended.wait(STOPPING_S)
            raise
        if self._failed:
            raise self._failed[0]
        return self._done[0]
