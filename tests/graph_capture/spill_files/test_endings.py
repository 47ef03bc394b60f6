"""The thread that closes files ends before Python does."""

from __future__ import annotations

import os
import subprocess
import sys

from remat.graph_capture.spill_files import FileCloser
from tests.paths import ROOT


class Thing:
    """Something that ends."""


def test_the_thread_ends_once_all_is_closed_that_has_ended() -> None:
    closer, (first, second) = FileCloser(), os.pipe()
    things = [Thing(), Thing()]
    for thing, descriptor in zip(things, (first, second), strict=True):
        closer.watch(thing, descriptor)
    del thing
    things.pop(0)
    closer.end()
    assert not closer._thread.is_alive()
    assert not os.path.exists(f"/proc/self/fd/{first}")
    os.fstat(second)
    os.close(second)


def test_no_thread_of_files_and_links_is_there_when_python_ends() -> None:
    script = (
        "import atexit, threading\n"
        # The first to be registered is the last to run.
        "atexit.register(lambda: print([one.name for one in threading.enumerate()]))\n"
        "import tempfile, torch\n"
        "from remat.rewriter.tiers.file_tier import FileTier\n"
        "tier = FileTier(1 << 20, 0, '')\n"
        "x = torch.ones(1000)\n"
        "handle = tier.leave(tier.offload(x, 0), x)\n"
        "pending = tier.fetch(handle)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['MainThread']\n", "")
