"""How the stages of a job are named, timed and shown to the person who waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Protocol


class Shown(Protocol):
    """Told how far a stage is, in parts of a total or in words."""

    def __call__(self, done: int = 0, total: int | None = None, *, text: str = "") -> None:
        """Show it."""
        ...


class Stopwatch:
    """Names and times the stages of a job. The command line's subclass shows them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, text: str) -> Generator[Shown]:
        """Time what runs inside under `name`; `text` is for the person who waits."""
        start = time.perf_counter()
        try:
            with self.show(text) as progress:
                yield progress
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[Shown]:
        """Show `text` while the stage runs; the base class shows nothing."""
        del text
        yield _silent


def _silent(done: int = 0, total: int | None = None, *, text: str = "") -> None:
    del done, total, text
