"""Ctrl-C over many searches: it ends the one under way, and no other of the same job gets time.

A search that Ctrl-C ends returns the best that it found. A job that makes several searches, such as
a sweep, has to know of it, or it would begin the next one. Within `one_job` each `Clock` has
nothing left from then on, and `is_interrupted` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Job:
    """The job of this process; Python gives Ctrl-C to one thread alone, so there is one."""

    depth: int = 0
    is_interrupted: bool = False


_job, _lock = _Job(), threading.Lock()


@contextmanager
def one_job() -> Generator[None]:
    """In the block, what Ctrl-C has ended stays ended; blocks within it are part of it."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(step: int) -> None:
    with _lock:
        _job.depth += step
        _job.is_interrupted &= _job.depth > 0


def note_interrupt() -> None:
    """Say that Ctrl-C came; nothing outside of a job."""
    _job.is_interrupted = _job.depth > 0


def is_interrupted() -> bool:
    """Whether Ctrl-C has ended the job."""
    return _job.is_interrupted
