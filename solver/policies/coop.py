"""Co-optimised allocation and rematerialization: evict the cheapest window of addresses.

Also called: Coop, sliding window eviction.
Paper: J. Zhang, S. Ma, P. Liu, J. Yuan, "Coop: Memory is not a Commodity", NeurIPS 2023,
https://arxiv.org/abs/2311.00591.
Solves: no stated problem; a rule for each moment at which no hole is large enough. Of all runs
of neighbours in memory that are holes or evictable and together large enough, the one with the
least sum of (c_nb + c) / dt is evicted whole, found by two pointers: c is a value's cost, c_nb
that of the evicted classes around, dt its staleness. Ops that are cheap for the bytes they
make place them from below, costly ones from above, so that windows hold values alike in cost;
cheap is less than the graph's mean cost a byte. Memory is an `Arena` with first fit, as large
as the budget leaves. The policy runs over the captured graph; its runs are the plan, pruned by
default, see `plan`.
Optimal only where nothing need be evicted. Cost: for each window a scan of the address space.
Shortcomings: uses no knowledge of the future; values that cannot move or be evicted split the
address space, so it may fail at a small budget that is enough in bytes; no bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat.solver.policies.arena import HOLE, Arena, cheapest_window
from remat.solver.policies.evicted import EvictedClasses
from remat.solver.policies.eviction import Books, Policy, Scores, Values
from remat.solver.policies.plan import PolicyPlanner
from remat.solver.problem import Problem


class CoopPolicy(Policy):
    """Evicts whole windows; cheap and costly values grow from opposite ends."""

    def __init__(self, problem: Problem, room_bytes: int) -> None:
        self.arena = Arena(room_bytes, problem.n_values + 1)
        super().__init__(problem, room_bytes, memory=self.arena, around=EvictedClasses(problem))
        made_bytes = sum(problem.output_bytes)
        self._mean_us = sum(problem.cost_us) / made_bytes if made_bytes else 0.0

    def scores(self, books: Books, values: Values) -> Scores:
        """What each adds to a window: its cost with that around it, over the time unused."""
        return self.with_neighbours_us(books, values) / books.staleness_us(values)

    def is_costly(self, op: int) -> bool:
        """Whether `op` costs more for each byte that it makes than the graph's ops on average."""
        return self.problem.cost_us[op] > self._mean_us * self.problem.output_bytes[op]

    def place(self, block: int, size_bytes: int, op: int) -> bool:
        """First fit from above for a costly op, from below for a cheap one."""
        return self.arena.place(block, size_bytes, "high" if self.is_costly(op) else "low")

    def victims(self, books: Books, asked_bytes: int) -> Sequence[int]:
        """The values of the cheapest window; none if no window is large enough."""
        values = np.flatnonzero(books.evictable)
        costs = np.full(books.evictable.size + 1, np.inf)
        costs[values] = self.scores(books, values)
        spans = list(self.arena.spans())
        window = cheapest_window(
            [size_bytes for _, size_bytes, _ in spans],
            [0.0 if owner == HOLE else float(costs[owner]) for _, _, owner in spans],
            asked_bytes,
        )
        if window is None:
            return ()
        return [owner for _, _, owner in spans[slice(*window)] if owner != HOLE]


@dataclass(frozen=True)
class Coop(PolicyPlanner):
    """Plans by Coop."""

    name = "coop"
    policy = CoopPolicy
