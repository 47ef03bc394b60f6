"""Many small whole steps in one process, which leave no file, no mapping and no thread behind.

Run as ``python tests/remat/whole_step/many_steps.py FOLDER STEPS``. Nothing else may be printed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
import torch

from remat.graph_capture.spill_files import HOST_FOLDER
from tests.fixed_costs import REPLACED, patched
from tests.limits import AMPLE_S
from tests.remat.whole_step.loops import Training, chain, gpt, momentum, same

OURS = {"remat-closing", "remat-d2h", "remat-h2d", "remat-read", "remat-write"}
GROWTH = 8
"""Mappings by which a process may grow over many steps: of the heap, and of threads."""


def many_steps(training: Training, steps: int, **asked: object) -> None:
    """Train so many whole steps beside eager, a few at a time."""
    other, step = training.twin(), training.planned(**asked)
    for first in range(0, steps, 5):
        count = min(5, steps - first)
        torch.manual_seed(first)
        expected = other.eager(0, count)
        torch.manual_seed(first)
        assert all(map(torch.equal, training.whole(step, 0, count), expected))
    assert same(training, other)
    step.close()


def files_open() -> list[str]:
    """The files that this process has open."""
    found = list[str]()
    for one in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(one))
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(found)


def mappings() -> int:
    """How many mappings of memory there are."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def main(folder: str, steps: int) -> None:
    """Train by each kind of step in turn; the first round opens what a process needs once."""
    os.environ[HOST_FOLDER] = folder
    below: list[dict[str, object]] = [
        {"host": "64MiB"}, {"host": 800_000, "nvme": f"{folder}:64MiB"}
    ]  # fmt: skip
    before: tuple[list[str], int] | None = None
    for each in (5, steps // 6):
        for count in (1, 2, 4):
            many_steps(chain(count, optimizer=momentum), each, budget=160_000, **below[0])
            many_steps(gpt(count), each, budget=450_000, **below[1])
        gc.collect()
        if before is None:
            before = files_open(), mappings()
    until_s = time.monotonic() + AMPLE_S
    while files_open() != before[0] and time.monotonic() < until_s:
        time.sleep(0.01)  # a thread closes them
    assert files_open() == before[0], (before[0], files_open())
    assert mappings() <= before[1] + GROWTH, (before[1], mappings())
    others = {one.name for one in threading.enumerate()} - {"MainThread"}
    assert others <= OURS, others


if __name__ == "__main__":
    with patched(REPLACED):
        main(sys.argv[1], int(sys.argv[2]))
