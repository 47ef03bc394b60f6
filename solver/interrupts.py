"""Ctrl-C over many searches: it ends the one under way, and no other of the same job gets time.

A search that Ctrl-C ends returns the best that it found. A job that makes several searches, such as
a sweep, has to know of it, or it would begin the next one. Within `one_job` each `Clock` has
nothing left from then on, and `is_interrupted` says so.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Job:
    """The job of this process; Python gives Ctrl-C to one thread alone, so there is one."""

    depth: int = 0
    is_interrupted: bool = False


_job = _Job()


@contextmanager
def one_job() -> Generator[None]:
    """In the block, what Ctrl-C has ended stays ended; blocks within it are part of it."""
    if not _job.depth:
        _job.is_interrupted = False
    _job.depth += 1
    try:
        yield
    finally:
        _job.depth -= 1
        if not _job.depth:
            _job.is_interrupted = False


def note_interrupt() -> None:
    """Say that Ctrl-C came; nothing outside of a job."""
    _job.is_interrupted = _job.depth > 0


def is_interrupted() -> bool:
    """Whether Ctrl-C has ended the job."""
    return _job.is_interrupted
