"""The 0/1 knapsack: which items to save for the most runtime within a memory.

Also called: the solvers ``dp``, ``greedy`` and ``ilp`` of PyTorch's activation memory budget
(torch/_functorch/_activation_checkpointing/knapsack.py). A `Selection` has their three results,
so that tests can compare the two. ``dp`` rounds each memory to a ten-thousandth of a unit, so
its choice may exceed the limit by that much for each item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.solver.backends.mip import Limits, MixedProgram, solve_program

SCALE = 10_000
"""Steps into which ``dp`` divides a unit of memory; torch has as many."""
RELATIVE_GAP = 1e-4


class Selection(NamedTuple):
    """Total runtime of the saved items, and the indices of saved and of other items."""

    saved_runtime: float
    saved: list[int]
    recomputable: list[int]


class KnapsackTable:
    """Dynamic program over quantised memory (``dp``), for any limit up to `max_memory`.

    Cost: items times 10,000 times `max_memory`.
    """

    def __init__(
        self, memory: Sequence[float], runtime: Sequence[float], max_memory: float
    ) -> None:
        capacity = round(max_memory * SCALE)
        self.weight = [round(size * SCALE) for size in memory]
        self.runtime = [float(np.float32(time)) for time in runtime]
        self.taken: list[npt.NDArray[np.bool_]] = []
        best = np.zeros(capacity + 1, np.float32)
        for weight, time in zip(self.weight, self.runtime, strict=True):
            with_item = np.zeros_like(best)
            if weight <= capacity:
                with_item[weight:] = best[: capacity + 1 - weight] + np.float32(time)
            self.taken.append(with_item > best)
            best = np.maximum(best, with_item)

    def choose(self, max_memory: float) -> Selection:
        """The items to save within `max_memory`; of equal choices, that of earlier items."""
        left = round(max_memory * SCALE)
        saved: list[int] = []
        other: list[int] = []
        for item in reversed(range(len(self.weight))):
            if self.taken[item][left]:
                saved.append(item)
                left -= self.weight[item]
            else:
                other.append(item)
        saved.reverse()
        return Selection(sum(self.runtime[item] for item in saved), saved, other)


def greedy_knapsack(
    memory: Sequence[float], runtime: Sequence[float], max_memory: float
) -> Selection:
    """Items by runtime for their memory, highest first, each saved if it still fits."""
    ratio = [time / size if size else math.inf for size, time in zip(memory, runtime, strict=True)]
    saved: list[int] = []
    other: list[int] = []
    used = 0.0
    for item in sorted(range(len(ratio)), key=lambda item: -ratio[item]):
        if used + memory[item] <= max_memory:
            used += memory[item]
            saved.append(item)
        else:
            other.append(item)
    return Selection(sum(runtime[item] for item in saved), saved, other)


def ilp_knapsack(
    memory: Sequence[float],
    runtime: Sequence[float],
    max_memory: float,
    time_limit_s: float = 60.0,
) -> Selection:
    """The best items to one part in 10,000, by integer programming; none if time runs out."""
    program = MixedProgram()
    items = [program.variable(-time, integer=True) for time in runtime]
    program.row([(i, size) for i, size in zip(items, memory, strict=True)], upper=max_memory)
    limits = Limits(time_limit_s=time_limit_s, relative_gap=RELATIVE_GAP)
    values = solve_program(program, limits).values if items else []
    saved = [i for i in items if values is not None and values[i] > 0.5]
    other = [i for i in items if values is None or values[i] <= 0.5]
    return Selection(sum(runtime[i] for i in saved), saved, other)
