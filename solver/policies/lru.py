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

from __future__ import annotations

from dataclasses import dataclass

from remat.solver.policies.eviction import Books, Policy, Scores, Values
from remat.solver.policies.plan import PolicyPlanner


class LruPolicy(Policy):
    """Least 1 / staleness."""

    def scores(self, books: Books, values: Values) -> Scores:
        """In 1 / microseconds."""
        return 1.0 / books.staleness_us(values)


@dataclass(frozen=True)
class Lru(PolicyPlanner):
    """Plans by LRU."""

    name = "lru"
    policy = LruPolicy
