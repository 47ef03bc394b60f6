"""Evictions as published: by last use, and two that mind the holes of an address space."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from remat.formats import MIB
from remat.solver.policies.eviction import EvictedClasses, Policy, Scores, ValueIds, ValueStatistics
from remat.solver.policies.online import PolicyPlanner
from remat.solver.problem import Problem


class LruPolicy(Policy):
    def scores(self, books: ValueStatistics, values: ValueIds) -> Scores:
        return 1.0 / books.staleness_us(values)


@dataclass(frozen=True)
class Lru(PolicyPlanner):
    """Evict what has not been used for longest.

    Also called: LRU, least recently used, h_LRU.
    Paper: as a rematerialization policy in M. Kirisame et al., "Dynamic Tensor
    Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
    Solves: no stated problem; a rule for each moment at which memory is full. The value of least
    1 / staleness goes. The policy runs over the captured graph; its runs are the plan, pruned by
    default, see `plan`.
    Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values.
    Shortcomings: blind to costs and sizes. Backward needs the oldest values last, which suits the
    rule, but what it evicts in forward makes long chains of recomputations; no bound.
    """

    name = "lru"
    policy = LruPolicy


# Source: D. Knuth, "The Art of Computer Programming", volume 1, section 2.5, and the caching
# allocators of frameworks.
HoleFit = Literal["best", "low", "high"]
"""The smallest hole that fits; the lowest one, filled from below; the highest, from above."""
HOLE = -1


class AddressSpace:
    """Blocks that cannot be moved: one needs a hole that holds all of it.

    For `dte` and `coop`, whose rules are about addresses. Their plans' peaks still count bytes.
    """

    def __init__(self, capacity_bytes: int, n_blocks: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.at: dict[int, int] = {}  # address of each block present
        # For each block present the bytes of the holes on both its sides.
        self.beside_bytes: npt.NDArray[np.int64] = np.zeros(n_blocks, np.int64)
        self._starts: list[int] = []
        self._spans: dict[int, tuple[int, int]] = {}  # by address, bytes and block or `HOLE`
        self._holes: list[int] = []
        if capacity_bytes > 0:
            self._insert(0, capacity_bytes, HOLE)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(address, bytes, block or `HOLE`) of all that there is, in address order."""
        for start in self._starts:
            yield start, *self._spans[start]

    def place(self, block: int, size_bytes: int, fit: HoleFit = "best") -> bool:
        # Blocks of 0 bytes have no address, so they always fit.
        if size_bytes == 0:
            return True
        holes = reversed(self._holes) if fit == "high" else self._holes
        enough = (hole for hole in holes if self._spans[hole][0] >= size_bytes)
        if fit == "best":
            hole = min(enough, key=lambda hole: (self._spans[hole][0], hole), default=None)
        else:
            hole = next(enough, None)
        if hole is None:
            return False
        rest_bytes = self._remove(hole) - size_bytes
        start = hole + rest_bytes if fit == "high" else hole
        self._insert(start, size_bytes, block)
        self.at[block] = start
        if rest_bytes:
            self._insert(hole if fit == "high" else hole + size_bytes, rest_bytes, HOLE)
        self._note_beside(start)
        return True

    def release(self, block: int) -> None:
        if block not in self.at:
            return
        start = self.at.pop(block)
        i = bisect_left(self._starts, start)
        first, last = max(i - 1, 0), i + 2
        # Join free neighbours, so that between two holes there always is a block.
        merged = [s for s in self._starts[first:last] if s == start or self._spans[s][1] == HOLE]
        self._insert(merged[0], sum([self._remove(s) for s in merged]), HOLE)
        self._note_beside(merged[0])

    def _insert(self, start: int, size_bytes: int, owner: int) -> None:
        insort(self._starts, start)
        self._spans[start] = size_bytes, owner
        if owner == HOLE:
            insort(self._holes, start)

    def _remove(self, start: int) -> int:
        self._starts.pop(bisect_left(self._starts, start))
        size_bytes, owner = self._spans.pop(start)
        if owner == HOLE:
            self._holes.pop(bisect_left(self._holes, start))
        return size_bytes

    def _note_beside(self, start: int) -> None:
        i = bisect_left(self._starts, start)
        # A change affects the holes beside it and the blocks beyond these.
        for j in range(max(i - 2, 0), min(i + 3, len(self._starts))):
            owner = self._spans[self._starts[j]][1]
            if owner != HOLE:
                self.beside_bytes[owner] = self._hole_bytes(j - 1) + self._hole_bytes(j + 1)

    def _hole_bytes(self, j: int) -> int:
        size_bytes, owner = (
            self._spans[self._starts[j]] if 0 <= j < len(self._starts) else (0, HOLE)
        )
        return size_bytes if owner == HOLE else 0


def cheapest_window(
    sizes_bytes: Sequence[int], costs: Sequence[float], asked_bytes: int
) -> tuple[int, int] | None:
    """The cheapest run of neighbours of at least `asked_bytes`, as (first, past the last), or None.

    Of equal runs the lowest is taken. An infinite cost is a barrier.
    """
    best: tuple[float, int, int] | None = None
    first, held_bytes, cost = 0, 0, 0.0
    for last, size_bytes in enumerate(sizes_bytes):
        if costs[last] == float("inf"):
            first, held_bytes, cost = last + 1, 0, 0.0
            continue
        held_bytes += size_bytes
        cost += costs[last]
        # Costs are not negative, so the shortest window that is large enough is the cheapest.
        while held_bytes - sizes_bytes[first] >= asked_bytes and first < last:
            held_bytes -= sizes_bytes[first]
            cost -= costs[first]
            first += 1
        if held_bytes >= asked_bytes and (best is None or cost < best[0]):
            best = cost, first, last + 1
    return best[1:] if best else None


_OFFSET = 1e-3
_RERUN_FACTOR = 1.0001


class DtePolicy(Policy):
    def __init__(self, problem: Problem, room_bytes: int) -> None:
        # The last block is the workspace of the op that runs.
        self.arena = AddressSpace(room_bytes, problem.n_values + 1)
        super().__init__(problem, room_bytes, memory=self.arena, around=EvictedClasses(problem))

    def scores(self, books: ValueStatistics, values: ValueIds) -> Scores:
        """In microseconds a MiB and microsecond."""
        # The hole that the eviction would leave: its bytes and the free ones on both sides.
        hole_mib = (books.size_bytes[values] + self.arena.beside_bytes[values]) / MIB
        # The constants 10^-3 and 1.0001 are the paper's.
        idle_us = books.clock_us - books.used_us[values] + _OFFSET
        cost_us = self.with_neighbours_us(books, values) + _OFFSET
        return cost_us * _RERUN_FACTOR ** books.reruns[values] / (hole_mib * idle_us)


@dataclass(frozen=True)
class Dte(PolicyPlanner):
    """Dynamic tensor evicting: DTR's rule with addresses, so that holes grow together.

    Also called: DTE, the policy of MegTaiChi; the sublinear memory of MegEngine's dynamic graphs.
    Paper: Z. Hu, J. Xiao, Z. Deng, M. Li, K. Zhang, X. Zhang, K. Meng, N. Sun, G. Tan, "MegTaiChi:
    Dynamic Tensor-based Memory Management Optimization for DNN Training", ICS 2022,
    https://doi.org/10.1145/3524059.3532394.
    Solves: no stated problem; a rule for each moment at which no hole is large enough. The value
    of least (c_nb + 10^-3) 1.0001^(times recomputed) / ((MiB + free MiB on both sides)(dt +
    10^-3)) goes, c_nb being its cost with the evicted classes around, dt its staleness, until one
    hole holds what is asked for. Memory is an `AddressSpace` with best fit, as large as the budget
    leaves. The policy runs over the captured graph; its runs are the plan, pruned by default, see
    `plan`.
    Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values.
    Shortcomings: those of `dtr`; evicts more than bytes alone ask for where memory is fragmented,
    which the plan's peak, counted in bytes, does not show; no bound.
    """

    name = "dte"
    policy = DtePolicy


class CoopPolicy(Policy):
    def __init__(self, problem: Problem, room_bytes: int) -> None:
        # The last block is the workspace of the op that runs.
        self.arena = AddressSpace(room_bytes, problem.n_values + 1)
        super().__init__(problem, room_bytes, memory=self.arena, around=EvictedClasses(problem))
        made_bytes = sum(problem.output_bytes)
        self._mean_us = sum(problem.cost_us) / made_bytes if made_bytes else 0.0

    def scores(self, books: ValueStatistics, values: ValueIds) -> Scores:
        """In microseconds a microsecond: what each adds to a window."""
        return self.with_neighbours_us(books, values) / books.staleness_us(values)

    def is_costly(self, op: int) -> bool:
        return self.problem.cost_us[op] > self._mean_us * self.problem.output_bytes[op]

    def place(self, block: int, size_bytes: int, op: int) -> bool:
        # Fill from both ends, so that windows hold values of similar cost.
        return self.arena.place(block, size_bytes, "high" if self.is_costly(op) else "low")

    def victims(self, books: ValueStatistics, asked_bytes: int) -> Sequence[int]:
        values = np.flatnonzero(books.evictable)
        # A value that must not be evicted is a barrier.
        costs = np.full(books.evictable.size + 1, np.inf)
        costs[values] = self.scores(books, values)
        spans = list(self.arena.spans())
        # Holes cost nothing.
        own = [0.0 if owner == HOLE else float(costs[owner]) for _, _, owner in spans]
        window = cheapest_window([size_bytes for _, size_bytes, _ in spans], own, asked_bytes)
        if window is None:
            return ()
        return [owner for _, _, owner in spans[slice(*window)] if owner != HOLE]


@dataclass(frozen=True)
class Coop(PolicyPlanner):
    """Co-optimised allocation and rematerialization: evict the cheapest window of addresses.

    Also called: Coop, sliding window eviction.
    Paper: J. Zhang, S. Ma, P. Liu, J. Yuan, "Coop: Memory is not a Commodity", NeurIPS 2023,
    https://arxiv.org/abs/2311.00591.
    Solves: no stated problem; a rule for each moment at which no hole is large enough. Of all runs
    of neighbours in memory that are holes or evictable and together large enough, the one with the
    least sum of (c_nb + c) / dt is evicted whole, found by two pointers: c is a value's cost, c_nb
    that of the evicted classes around, dt its staleness. Ops that are cheap for the bytes they
    make place them from below, costly ones from above, so that windows hold values alike in cost;
    cheap is below the graph's mean cost a byte. Memory is an `AddressSpace`, first fit, as large
    as the budget leaves. The policy runs over the captured graph; its runs are the plan, pruned by
    default, see `plan`.
    Optimal only where nothing need be evicted. Cost: for each window a scan of the address space.
    Shortcomings: uses no knowledge of the future; values that cannot move or be evicted split the
    address space, so it may fail at a small budget that is enough in bytes; no bound.
    """

    name = "coop"
    policy = CoopPolicy
