"""What an online policy sees, and which value it evicts: that of least score, made exact first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from remat.solver.problem import Problem

# What has been evicted around a value, e* of M. Kirisame et al., "Dynamic Tensor
# Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616: the summed cost of evicted values
# that it would need, or that would need it. `EvictedReach` follows paths and is exact.
# `EvictedClasses` joins neighbours by union-find; a recomputation takes its cost off the class,
# which stays joined (the paper's splitting approximation). Each output counts its op's whole cost.

_Costs = npt.NDArray[np.float64]
_Links = tuple[tuple[int, ...], ...]


def links(problem: Problem) -> tuple[_Links, _Links]:
    """For each value those its op reads, and those that its readers make."""
    below = tuple(problem.inputs[op] for op in problem.producer)
    above: list[list[int]] = [[] for _ in range(problem.n_values)]
    for op in range(problem.n_ops):
        for v in problem.inputs[op]:
            above[v] += problem.outputs[op]
    return below, tuple(tuple(dict.fromkeys(values)) for values in above)


class EvictedClasses:
    """Classes of evicted values; `cost_us` sums those that touch a value, each once."""

    def __init__(self, problem: Problem) -> None:
        below, above = links(problem)
        self.beside: _Links = tuple(
            tuple(dict.fromkeys((*low, *high))) for low, high in zip(below, above, strict=True)
        )
        self.own_us = [problem.cost_us[op] for op in problem.producer]
        self.cost_us: _Costs = np.zeros(problem.n_values)
        self._node = [-1] * problem.n_values
        self._parent: list[int] = []
        self._class_us: list[float] = []
        self._touched: list[dict[int, int]] = []  # of a root: neighbours, with how many links

    def refresh(self, v: int) -> bool:
        return True

    def add(self, v: int) -> None:
        node = len(self._parent)
        self._node[v] = node
        self._parent.append(node)
        self._class_us.append(self.own_us[v])
        self._touched.append(dict.fromkeys(self.beside[v], 1))
        for u in self.beside[v]:
            self.cost_us[u] += self.own_us[v]
        for u in self.beside[v]:
            if self._node[u] >= 0:
                self._join(self._find(self._node[u]), self._find(node))

    def remove(self, v: int) -> None:
        root = self._find(self._node[v])
        self._node[v] = -1  # the paper's splitting approximation
        touched = self._touched[root]
        self.cost_us[_keys(touched)] -= self.own_us[v]
        self._class_us[root] -= self.own_us[v]
        for u in self.beside[v]:
            touched[u] -= 1
            if not touched[u]:
                del touched[u]
                self.cost_us[u] -= self._class_us[root]

    def _find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = node = self._parent[self._parent[node]]
        return node

    def _join(self, one: int, other: int) -> None:
        if one == other:
            return
        # Smaller into larger: each link moves O(log n) times.
        if len(self._touched[one]) < len(self._touched[other]):
            one, other = other, one
        large, small = self._touched[one], self._touched[other]
        self.cost_us[_keys(large)] += self._class_us[other]
        self.cost_us[_keys(small)] += self._class_us[one]
        for u, count in small.items():
            if u in large:
                # A neighbour of both counts the class once.
                self.cost_us[u] -= self._class_us[one] + self._class_us[other]
            large[u] = large.get(u, 0) + count
        self._parent[other] = one
        self._class_us[one] += self._class_us[other]
        self._touched[other] = {}


def _keys(touched: dict[int, int]) -> npt.NDArray[np.int64]:
    return np.fromiter(touched, np.int64, len(touched))


class EvictedReach:
    """Evicted values on paths of evicted ones, from a value down to sources and up to uses."""

    def __init__(self, problem: Problem, *, ancestors_only: bool = False) -> None:
        below, above = links(problem)
        self.own_us = [problem.cost_us[op] for op in problem.producer]
        self.cost_us: _Costs = np.zeros(problem.n_values)
        self._ways: tuple[_Links, ...] = (below,) if ancestors_only else (below, above)
        self._back: tuple[_Links, ...] = (above,) if ancestors_only else (above, below)
        self._evicted = bytearray(problem.n_values)
        self._exact = bytearray(b"\1") * problem.n_values

    def add(self, v: int) -> None:
        self._evicted[v] = 1
        self._forget(v)

    def remove(self, v: int) -> None:
        self._forget(v)
        self._evicted[v] = 0

    def refresh(self, v: int) -> bool:
        if self._exact[v]:
            return True
        self._exact[v] = 1
        found: set[int] = set()
        for links_of in self._ways:
            found.update(self._walk(v, links_of)[0])
        # In a fixed order: sums of floats depend on it.
        self.cost_us[v] = sum(self.own_us[u] for u in sorted(found))
        return False

    def _forget(self, v: int) -> None:
        self._exact[v] = 0  # sums at the ends of paths through it are forgotten: 0 is a lower bound
        self.cost_us[v] = 0.0
        for links_of in self._back:
            for u in (u for part in self._walk(v, links_of) for u in part):
                self._exact[u] = 0
                self.cost_us[u] = 0.0

    def _walk(self, v: int, links_of: _Links) -> tuple[Sequence[int], Sequence[int]]:
        """Evicted values on paths from v, and where the paths end."""
        inside: list[int] = []
        ends: list[int] = []
        seen, waiting = {v}, [v]
        while waiting:
            for u in links_of[waiting.pop()]:
                if u not in seen:
                    seen.add(u)
                    (inside if self._evicted[u] else ends).append(u)
                    if self._evicted[u]:
                        waiting.append(u)
        return inside, ends


Neighbourhood = EvictedClasses | EvictedReach
"""Told what is evicted and what no longer. `cost_us` is of evicted neighbourhoods; of values that
are not evicted it may be a lower bound, until `refresh` returns whether it already was exact."""


Scores = npt.NDArray[np.float64]
ValueIds = npt.NDArray[np.int64]
_LEAST_STALENESS_US = 1e-3  # divides scores: it would be zero for what was just used


class _Memory(Protocol):
    """Where values lie: a count of bytes or an `AddressSpace`."""

    def place(self, block: int, size_bytes: int) -> bool:
        """Put a block; return whether it fits."""
        ...

    def release(self, block: int) -> None:
        """Take a block away."""


class ByteCount:
    """Memory without addresses: whatever is free can be used."""

    def __init__(self, capacity_bytes: int) -> None:
        self.free_bytes = capacity_bytes
        self._sizes: dict[int, int] = {}

    def place(self, block: int, size_bytes: int) -> bool:
        if size_bytes > self.free_bytes:
            return False
        self.free_bytes -= size_bytes
        self._sizes[block] = size_bytes
        return True

    def release(self, block: int) -> None:
        self.free_bytes += self._sizes.pop(block, 0)


class ValueStatistics:
    def __init__(self, problem: Problem) -> None:
        self.size_bytes: ValueIds = np.array(problem.size_bytes, np.int64)
        self.cost_us: Scores = np.array([problem.cost_us[op] for op in problem.producer], float)
        # 1 where it may go now.
        self.evictable: npt.NDArray[np.uint8] = np.zeros(problem.n_values, np.uint8)
        self.used_us: Scores = np.zeros(problem.n_values)  # when it was last made or read
        self.reruns: ValueIds = np.zeros(problem.n_values, np.int64)  # how often it was made again
        self.clock_us = 0.0  # of all runs so far; an op without cost counts as 1

    def staleness_us(self, values: ValueIds) -> Scores:
        return np.maximum(self.clock_us - self.used_us[values], _LEAST_STALENESS_US)


class Policy(ABC):
    """Evicts the value of least score, one at a time, from a count of bytes; subclasses score."""

    def __init__(
        self, problem: Problem, room_bytes: int, *, memory: _Memory | None = None,
        around: Neighbourhood | None = None,
    ) -> None:  # fmt: skip
        self.problem = problem
        self.memory: _Memory = memory or ByteCount(room_bytes)
        self.around = around

    @abstractmethod
    def scores(self, books: ValueStatistics, values: ValueIds) -> Scores:
        """Or a lower bound, until `around.refresh` is called."""

    def place(self, block: int, size_bytes: int, op: int) -> bool:
        """An output or workspace of `op`; whether it fits."""
        return self.memory.place(block, size_bytes)

    def victims(self, books: ValueStatistics, asked_bytes: int) -> Sequence[int]:
        """To evict now, so that `asked_bytes` may fit; none if there are none."""
        values = np.flatnonzero(books.evictable)
        while values.size:
            v = int(values[np.argmin(self.scores(books, values))])
            if self.around is None or self.around.refresh(v):  # the least is made exact first
                return (v,)
        return ()

    def with_neighbours_us(self, books: ValueStatistics, values: ValueIds) -> Scores:
        if self.around is None:
            return books.cost_us[values]
        # Rounding may leave less than 0.
        return books.cost_us[values] + np.maximum(self.around.cost_us[values], 0.0)

    def evicted(self, v: int) -> None:
        """Value v has left memory and can be made again."""
        if self.around is not None:
            self.around.add(v)

    def returned(self, v: int) -> None:
        """Value v is back, or can never be made again."""
        if self.around is not None:
            self.around.remove(v)
