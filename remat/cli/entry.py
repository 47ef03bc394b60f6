"""The `remat` command: what comes before its verbs are imported, which takes half a second."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator

_began: list[float] = []
"""When the command began, until its session has taken it."""


def command() -> None:
    """Entry point of the `remat` command."""
    _began.append(time.perf_counter() - _since_start_s())
    with ended_by_ctrl_c():
        from remat.cli.main import main as run_verb
    run_verb()


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


@contextlib.contextmanager
def ended_by_ctrl_c() -> Generator[None]:
    """In the block, Ctrl-C ends the process without a traceback: there is nothing to keep yet.

    A shell sees exit code 130, as it does later.
    """
    own, is_main = signal.default_int_handler, threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not own:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
