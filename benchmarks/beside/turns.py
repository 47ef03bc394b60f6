"""Rows that are set up side by side take turns where they are timed, or time ops to plan."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path


class Turns:
    """A lock file: many processes may prepare at once, one is alone while it measures.

    Attributes
    ----------
    waited_s : for others, in all.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self.waited_s = 0.0

    def _take(self, kind: int) -> None:
        began_s = time.perf_counter()
        fcntl.flock(self._file, kind)
        self.waited_s += time.perf_counter() - began_s

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        self._take(kind)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def preparing(self) -> AbstractContextManager[None]:
        """While this is held, nobody measures."""
        return self._held(fcntl.LOCK_SH)

    def measuring(self) -> AbstractContextManager[None]:
        """While this is held, nobody else prepares or measures."""
        return self._held(fcntl.LOCK_EX)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A part of preparing in which nobody else prepares or measures.

        The lock is let go of before it is taken anew, so that two who ask at once cannot wait
        for each other.
        """
        self._take(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._take(fcntl.LOCK_SH)


@dataclass(frozen=True)
class Quiet:
    """What a plan needs to itself: the machine, where ops are timed and where it is solved.

    Attributes
    ----------
    priced : a file that is there once ops were timed; rows after that find their prices kept.
    """

    turns: Turns
    priced: Path

    @contextmanager
    def pricing(self) -> Iterator[None]:
        """Alone, unless prices are kept already."""
        with nullcontext() if self.priced.exists() else self.turns.alone():
            yield
        self.priced.touch()

    def solving(self) -> AbstractContextManager[None]:
        """Alone: a solver is given seconds, and would find less beside others."""
        return self.turns.alone()
