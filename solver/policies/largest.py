"""Evict what is largest.

Also called: greedy by size, h_size.
Paper: as a rematerialization policy in M. Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
Solves: no stated problem; a rule for each moment at which memory is full. The value of least
1 / bytes goes, of equals the one made first in the captured order. The policy runs over the
captured graph; its runs are the plan, pruned by default, see `plan`.
Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values.
Shortcomings: blind to costs and to recency, so it may evict again at once what it has just
had recomputed; fewest evictions, but long recomputations; no bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.solver.policies.eviction import Books, Policy, Scores, Values
from remat.solver.policies.plan import PolicyPlanner


class LargestPolicy(Policy):
    """Least 1 / bytes."""

    def scores(self, books: Books, values: Values) -> Scores:
        """In 1 / bytes."""
        return 1.0 / books.size_bytes[values]


@dataclass(frozen=True)
class Largest(PolicyPlanner):
    """Plans by size."""

    name = "largest"
    policy = LargestPolicy
