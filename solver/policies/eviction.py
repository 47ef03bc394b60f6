"""What an online policy sees, and what it decides: which value to evict when room is needed.

NumPy scores all evictable values at once, and the value of least score goes. A score may be
only a lower bound. It is then made exact when it is the least, and the search goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from remat.solver.policies.evicted import Neighbourhood
from remat.solver.problem import Problem

Scores = npt.NDArray[np.float64]
Values = npt.NDArray[np.int64]
LEAST_STALENESS_US = 1e-3
"""Scores are divided by staleness, which would be zero for what was used just now."""


class Memory(Protocol):
    """Where values lie: a count of bytes or an `Arena`."""

    def place(self, block: int, size_bytes: int) -> bool:
        """Put a block; return whether it fits."""
        ...

    def release(self, block: int) -> None:
        """Take a block away."""
        ...


class ByteCount:
    """Memory without addresses: whatever is free can be used."""

    def __init__(self, capacity_bytes: int) -> None:
        self.free_bytes = capacity_bytes
        self._sizes: dict[int, int] = {}

    def place(self, block: int, size_bytes: int) -> bool:
        """Put a block; return whether it fits."""
        if size_bytes > self.free_bytes:
            return False
        self.free_bytes -= size_bytes
        self._sizes[block] = size_bytes
        return True

    def release(self, block: int) -> None:
        """Take a block away."""
        self.free_bytes += self._sizes.pop(block, 0)


class Books:
    """What is known of each value while ops run.

    Attributes
    ----------
    size_bytes, cost_us : of the value and of its op. evictable : 1 where it may go now.
    used_us : the clock when it was last made or read. reruns : how often it was made again.
    clock_us : time of all runs so far; an op without cost counts as one microsecond.
    """

    def __init__(self, problem: Problem) -> None:
        self.size_bytes: Values = np.array(problem.size_bytes, np.int64)
        self.cost_us: Scores = np.array([problem.cost_us[op] for op in problem.producer], float)
        self.evictable: npt.NDArray[np.uint8] = np.zeros(problem.n_values, np.uint8)
        self.used_us: Scores = np.zeros(problem.n_values)
        self.reruns: Values = np.zeros(problem.n_values, np.int64)
        self.clock_us = 0.0

    def staleness_us(self, values: Values) -> Scores:
        """Time since each was last used, at least `LEAST_STALENESS_US`."""
        return np.maximum(self.clock_us - self.used_us[values], LEAST_STALENESS_US)


class Policy(ABC):
    """Evicts the value of least score, one at a time, from a count of bytes.

    Subclasses give `scores`, and what else they watch.
    """

    def __init__(
        self,
        problem: Problem,
        room_bytes: int,
        *,
        memory: Memory | None = None,
        around: Neighbourhood | None = None,
    ) -> None:
        self.problem = problem
        self.memory: Memory = memory or ByteCount(room_bytes)
        self.around = around

    @abstractmethod
    def scores(self, books: Books, values: Values) -> Scores:
        """The score of each of `values`, or a lower bound until `around.refresh` is called."""

    def place(self, block: int, size_bytes: int, op: int) -> bool:
        """Put what `op` makes, or its workspace, into memory; return whether it fits."""
        return self.memory.place(block, size_bytes)

    def victims(self, books: Books, asked_bytes: int) -> Sequence[int]:
        """Values to evict now, so that `asked_bytes` may fit; none if there are none."""
        values = np.flatnonzero(books.evictable)
        while values.size:
            v = int(values[np.argmin(self.scores(books, values))])
            if self.around is None or self.around.refresh(v):
                return (v,)
        return ()

    def with_neighbours_us(self, books: Books, values: Values) -> Scores:
        """Cost of each value and of its evicted neighbourhood."""
        if self.around is None:
            return books.cost_us[values]
        return books.cost_us[values] + np.maximum(self.around.cost_us[values], 0.0)

    def evicted(self, v: int) -> None:
        """Value v has left memory and can be made again."""
        if self.around is not None:
            self.around.add(v)

    def returned(self, v: int) -> None:
        """Value v is back, or can never be made again."""
        if self.around is not None:
            self.around.remove(v)
