"""Steps timed in turn in one process, without glibc giving memory back in between.

When all tensors of a step are dropped, glibc returns their pages, and the next step pays for
new ones: the more, the higher its peak. In turns, a step pays for what the one before it returned,
which says nothing of either. A thread that once found glibc's first arena busy stays with another,
and those return their pages whatever they are told: so there is only one.
"""

from __future__ import annotations

import os
import sys

SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
"""Read by glibc when a process starts; others ignore them."""


def restart_keeping_memory(module: str) -> None:
    """Run `module` anew with these settings, unless this process has them."""
    if not SETTINGS.keys() <= os.environ.keys():
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **SETTINGS})
