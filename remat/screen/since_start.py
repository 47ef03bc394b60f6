"""When a command began: before its imports, which take a second."""

from __future__ import annotations

import os
import time

_began: list[float] = []
"""Until a session has taken it."""


def note_start() -> None:
    """Note when this process was started, or now where the system does not say."""
    _began[:] = [time.perf_counter() - _since_start_s()]


def _since_start_s() -> float:
    """How long this process has been there, where the system says so; else 0."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])  # `starttime` of proc(5)
        started_s = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):  # it is no Linux
        return 0.0


def when_it_began() -> float:
    """On `time.perf_counter`; now where no command has begun, as in a test."""
    return _began.pop() if _began else time.perf_counter()
