"""Rows are set up side by side; one at a time has a core to itself, to time a step or its ops."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison.cores import core_apart


class Turns:
    """A lock file: whoever holds it measures, on a core that no other row uses.

    Parameters
    ----------
    family : the process whose descendants keep off that core; None if the others need not.

    Attributes
    ----------
    waited_s : for others, in all.
    """

    def __init__(self, path: Path, family: int | None = None) -> None:
        self._file = path.open("a")
        self._family = family
        self.waited_s = 0.0

    @contextmanager
    def alone(self, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """The only one to measure.

        Parameters
        ----------
        unless : says that there is no need; asked again when others were waited for.
        """
        with contextlib.ExitStack() as held:
            if not unless():
                held.enter_context(self._lock())
                if unless():
                    held.close()
                elif self._family is not None:
                    held.enter_context(core_apart(self._family))
            yield

    @contextmanager
    def first(self, done: Path) -> Iterator[None]:
        """Alone, unless it was done before, which the file `done` tells."""
        with self.alone(unless=done.exists):
            yield
        done.touch()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        began_s = time.perf_counter()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.waited_s += time.perf_counter() - began_s
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


@dataclass(frozen=True)
class Quiet:
    """What a plan needs to itself: a core, where ops are timed and where it is solved.

    Attributes
    ----------
    priced : a file that is there once ops were timed; rows after that find their prices kept.
    """

    turns: Turns
    priced: Path

    def pricing(self) -> AbstractContextManager[None]:
        """Alone, unless prices are kept already."""
        return self.turns.first(self.priced)

    def solving(self) -> AbstractContextManager[None]:
        """Alone: a solver is given seconds, and would find less beside others."""
        return self.turns.alone()
