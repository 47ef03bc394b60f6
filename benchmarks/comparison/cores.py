"""A core that one process of a family has to itself for a while.

Other work beside a timed step shifts its time, and not that of all steps alike. With three
compilations on the other of two cores, a U-Net's step took .164 s, and 1.451 times as long with
a checkpoint around each block; without them .161 and .163 s, 1.439 and 1.450 times. A mixture of
experts took .151 s and 1.391 times beside them, .154 and .153 s, 1.393 and 1.407 times without.
So with a core apart, rows differ by no more than two quiet runs do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Set
from pathlib import Path

CORES = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
"""The cores that this process may use, read before any is set apart."""


@contextlib.contextmanager
def core_apart(family: int) -> Iterator[None]:
    """Keep this process on one core, and all others that descend from `family` off it.

    Does nothing if there is only one core, or if the system cannot place processes: Linux can.
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
    """Place the family on `cores`; twice, for processes that started during the first pass."""
    for _ in range(2):
        for process in descendants(family):
            _move(process, cores)


def _move(process: int, cores: Set[int]) -> None:
    """All threads of a process, unless it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def descendants(family: int) -> Iterator[int]:
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
