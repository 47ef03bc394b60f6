"""Steps timed in turn in one process, without glibc giving memory back in between.

When all tensors of a step are dropped, glibc returns their pages, and the next step pays for new
ones: the more, the higher its peak. In turns, a step would pay for what the one before it
returned, which says nothing of either. There is only one arena, because a thread that once finds
the first one busy stays with another, and other arenas return their pages in any case.
"""

from __future__ import annotations

import os
import sys

SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
"""glibc reads these when a process starts; other C libraries ignore them."""


def restart_keeping_memory(module: str) -> None:
    """Run `module` anew with these settings, unless this process has them."""
    if not SETTINGS.keys() <= os.environ.keys():
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **SETTINGS})
