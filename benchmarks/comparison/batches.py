"""The largest batch that fits a budget by each method, and what a step then costs.

A CPU does not run out at the budget, so a batch fits if the profiler sees no more than that
allocated. On a GPU the allocator is told that it has no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks.comparison import methods
from benchmarks.comparison.bench import Bench
from benchmarks.comparison.calm import ROUNDS, Timed
from benchmarks.comparison.models import SUITES
from benchmarks.comparison.row import variant_of
from benchmarks.comparison.turns import Turns

CHECKPOINTS: tuple[tuple[str, float], ...] = (
    ("eager", 0), ("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 4), ("selective", 0),
    ("sequential", 0),
)  # fmt: skip
METHODS = (*CHECKPOINTS, ("remat", 0.10), ("remat", 0.30))
"""The number of ours is the overhead that is allowed."""
GPU_GIB = (16, 24, 40, 80)
EACH_S = 5.0


def largest(holds: Callable[[int], bool], first: int, guess: int) -> int:
    """The largest size that holds, by bisection; 0 if none does.

    `first` and `guess` are tried before any other.
    """
    low, high = 0, None
    for size in sorted({first, max(1, guess)}):
        if high is None and holds(size):
            low = size
        elif high is None:
            high = size
    while high is None or high - low > 1:
        size = 2 * low if high is None else (low + high) // 2
        if holds(size):
            low = size
        else:
            high = size
    return low


def by_method(
    suite: str, model: str, method: str, amount: float, budget: int, turns: Turns
) -> dict[str, Any]:
    """The largest batch of one of torch's methods, and its time over eager's at that batch."""
    entry = SUITES[suite][model]
    device = "cuda" if suite == "gpu" else "cpu"

    @cache
    def peak_bytes(batch: int) -> int:
        bench = Bench(entry.make(batch), device)
        variant = variant_of(bench, method, amount)
        bench.step(variant)
        return bench.peaks(variant)["peak_bytes"]

    def holds(batch: int) -> bool:
        try:
            return peak_bytes(batch) <= budget
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False

    guess = entry.batch
    if holds(entry.batch):
        small, more = peak_bytes(entry.batch), peak_bytes(entry.batch + 1)
        guess += int((budget - small) / max(1, more - small))
    batch = largest(holds, entry.batch, guess)
    if not batch:
        return {"batch": 0}
    bench = Bench(entry.make(batch), device)
    eager, variant = methods.eager(bench.trainee), variant_of(bench, method, amount)
    a_round = bench.rounds(eager, variant)
    with turns.alone():
        timed = Timed([[a_round() for _ in range(ROUNDS)]], was_slow=False)
    return {
        "batch": batch, "peak_bytes": peak_bytes(batch), "over_eager": timed.ratio(1, 0) - 1,
    }  # fmt: skip


def by_plan(suite: str, model: str, overhead: float, budget: int) -> dict[str, Any]:
    """The largest batch that a plan makes fit at an overhead of at most `overhead`."""
    entry = SUITES[suite][model]

    def factory(batch: int) -> dict[str, Any]:
        made = entry.make(batch)
        return {"model": made.model, "args": made.args}

    first = (entry.batch, 2 * entry.batch)
    found = remat.largest_batch(
        factory, budget=budget, max_overhead=overhead, sizes=first, each_s=EACH_S, check=True
    )
    planned = {} if found.answer is None else {"planned_overhead": found.answer.overhead}
    return {"batch": found.size, "peak_bytes": found.measured_peak_bytes, **planned}


def found(
    suite: str, model: str, method: str, amount: float, budget: int, turns: Path
) -> dict[str, Any]:
    """The largest batch of a method within a budget, found in this process."""
    torch.set_num_threads(1)
    if suite == "gpu":
        share = budget / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    if method == "remat":
        return by_plan(suite, model, amount, budget)
    whose = Turns(turns, None if suite == "gpu" else os.getppid())
    return by_method(suite, model, method, amount, budget, whose)
