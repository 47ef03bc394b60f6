"""Rows that are set up side by side take turns where they are timed."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


class Turns:
    """A lock file: many processes may prepare at once, one is alone while it measures."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        with self.path.open("a") as file:
            fcntl.flock(file, kind)
            yield

    def preparing(self) -> AbstractContextManager[None]:
        """While this is held, nobody measures."""
        return self._held(fcntl.LOCK_SH)

    def measuring(self) -> AbstractContextManager[None]:
        """While this is held, nobody else prepares or measures."""
        return self._held(fcntl.LOCK_EX)
