"""Threads beside this one, which may draw from torch's random streams at any moment."""

from __future__ import annotations

import sys
import threading
from typing import Any

from remat.graph_capture.python_state.reached import is_installed, is_library

_FOR_OTHERS = "concurrent.futures"
"""Its threads run what they are given."""


def others_may_draw() -> bool:
    """Whether a thread of the user's is alive; those that libraries have do not draw."""
    here = threading.current_thread()
    return any(_is_users(one) for one in threading.enumerate() if one is not here)


def _is_users(thread: threading.Thread) -> bool:
    run: Any = getattr(thread, "_target", None) or type(thread).run
    module = getattr(run, "__module__", None) or ""
    is_known = is_library(module) or is_installed(sys.modules.get(module))
    return module.startswith(_FOR_OTHERS) or not is_known
