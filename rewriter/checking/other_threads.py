"""Threads beside this one, which may draw from torch's random streams at any moment."""

from __future__ import annotations

import sys
import threading
from typing import Any

from remat.graph_capture.python_state.reached import is_users_module

_FOR_OTHERS = "concurrent.futures"
"""Its threads run what they are given."""


def others_may_draw() -> bool:
    """Whether a thread of the user's is alive; those that libraries have do not draw."""
    here = threading.current_thread()
    return any(_is_users(one) for one in threading.enumerate() if one is not here)


def _is_users(thread: threading.Thread) -> bool:
    run: Any = getattr(thread, "_target", None) or type(thread).run
    module = getattr(run, "__module__", None) or ""
    if module.startswith(_FOR_OTHERS):
        return not _is_idle(thread, run)
    return is_users_module(module)


def _is_idle(thread: threading.Thread, run: Any) -> bool:
    """Whether a pool's thread waits for work, which only a thread that runs could give it.

    Pools outlive their use: torch's compiler and this package's own links to files have some.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_code is not getattr(run, "__code__", None):  # within what it runs
        return False
    queue = frame.f_locals.get("work_queue")
    return queue is not None and queue.empty()
