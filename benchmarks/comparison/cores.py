"""A core that one process of a family has to itself for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Set
from pathlib import Path

CORES = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
"""Those that this process may use; read before any is set apart."""


@contextlib.contextmanager
def core_apart(family: int) -> Iterator[None]:
    """Keep this process on one core, and all others that descend from `family` off it.

    Nothing is done where there is but one core, or none can be asked for (Linux alone can).
    """
    if len(CORES) < 2:
        yield
        return
    own = min(CORES)
    _place(family, CORES - {own})
    _move(os.getpid(), {own})
    try:
        yield
    finally:
        _move(os.getpid(), CORES)
        _place(family, CORES)


def _place(family: int, cores: Set[int]) -> None:
    """Twice, for those that were started while the first went on."""
    for _ in range(2):
        for process in _descendants(family):
            _move(process, cores)


def _move(process: int, cores: Set[int]) -> None:
    """All threads of a process, unless it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def _descendants(family: int) -> Iterator[int]:
    """A process, its children, theirs and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            after_name = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    stack = [family]
    while stack:
        process = stack.pop()
        yield process
        stack += children.get(process, [])
