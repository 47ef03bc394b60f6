"""Ctrl-C waits until a few lines of Python have ended: an update is made wholly or not at all."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """Hold Ctrl-C back meanwhile, and let it be heard afterwards.

    Python hears it in the main thread alone, so elsewhere nothing is to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = list[Any]()
    before = signal.signal(signal.SIGINT, lambda *given: heard.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if heard:
            signal.raise_signal(signal.SIGINT)
