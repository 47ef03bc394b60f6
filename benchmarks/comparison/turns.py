"""Rows are set up side by side; one at a time has a core to itself, to time a step or its ops.

Solving takes a turn too. Setting up takes longest, so a suite would take several times as long
if rows came one after the other. `cores` says what other work does to times.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from benchmarks.comparison.cores import core_apart


class Turns:
    """A lock file: whoever holds it measures, on a core that no other row uses.

    Parameters
    ----------
    family : the process whose descendants keep off that core; None if they may stay.

    Attributes
    ----------
    waited_s : seconds spent waiting for others, in all.
    """

    def __init__(self, path: Path, family: int | None = None) -> None:
        self._turn = FileLock(path)
        self._family = family
        self.waited_s = 0.0

    @contextmanager
    def alone(self, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Hold the turn, so that nobody else measures.

        Parameters
        ----------
        unless : says that no turn is needed. It is asked again after waiting, since another row
            may have done the work.
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
        """Hold the turn, unless the file `done` says that the work was done before."""
        with self.alone(unless=done.exists):
            yield
        done.touch()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        began_s = time.perf_counter()
        with self._turn:
            self.waited_s += time.perf_counter() - began_s
            yield


@dataclass(frozen=True)
class Quiet:
    """A turn for the parts of planning that need a core: timing ops, and solving.

    Attributes
    ----------
    timed : a file that exists once the model's ops were timed. Later rows find the costs kept.
    """

    turns: Turns
    timed: Path

    def timing(self) -> AbstractContextManager[None]:
        """Hold the turn, unless costs are kept already."""
        return self.turns.first(self.timed)

    def solving(self) -> AbstractContextManager[None]:
        """Hold the turn: a solver is given seconds, and would find less beside others."""
        return self.turns.alone()
