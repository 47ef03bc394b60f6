"""The arena, compiled with the address sanitizer, through steps, recording, threads and its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

EXERCISE = """
import gc, threading
import torch
from tests.fixed_costs import REPLACED, patched
from tests.rewriter.arena.steps_in_arena import in_arena, loss_of, module_of, same, trained
from remat.rewriter.arena.library import arena_library

with patched(REPLACED):
    module, arena = in_arena("dropout")
    plain = module_of("dropout")
assert same(trained("dropout", module), trained("dropout", plain))
assert arena.counts.hits
kept = loss_of("dropout", module)
kept.backward()
given = [parameter.grad for parameter in module.parameters()]
arena.close()
assert arena_library()._c.remat_arenas_mapped() == 1, "gradients lie in it"
for parameter in module.parameters():
    parameter.grad = None
# The last blocks end in another thread.
other = threading.Thread(target=given.clear)
other.start()
other.join()
del kept
gc.collect()
assert arena_library()._c.remat_arenas_mapped() == 0
"""


def sanitizer() -> str:
    """The library of gcc's address sanitizer."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    asked = [compiler, "-print-file-name=libasan.so"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip("g++ comes without the address sanitizer here")
    return os.path.realpath(path)


def run_sanitized(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script whose arena is compiled with the sanitizer; each report goes to standard error."""
    env = {
        "CXX": "g++ -fsanitize=address -g", "REMAT_CACHE": str(folder), "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": sanitizer(), "OMP_NUM_THREADS": "1",
        # What Python and torch keep until their end is no leak of the arena's.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_an_exercise_of_the_arena_has_a_clean_report(tmp_path: Path) -> None:
    done = run_sanitized(EXERCISE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (library,) = tmp_path.glob("arena-cpu-*.so")
    assert b"__asan_" in library.read_bytes()
