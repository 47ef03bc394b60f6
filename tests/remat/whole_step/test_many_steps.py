"""500 small whole steps under the checks of glibc's heap, and a process that ends in peace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.debug_malloc import debug_malloc

STEPS = 500


@pytest.mark.slow
def test_many_small_whole_steps_touch_no_memory_that_is_not_theirs(tmp_path: Path) -> None:
    cache = {"REMAT_CACHE": str(tmp_path / "prices"), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("many_steps.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(STEPS)],
        env={**os.environ, **cache, **debug_malloc()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
