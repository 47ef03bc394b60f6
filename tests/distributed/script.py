"""Runs a script on this rank: ``torchrun ... tests/distributed/script.py SCRIPT``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.distributed.launch import end_process

if __name__ == "__main__":
    # As if it were run by itself: it imports what lies beside it.
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    end_process()
