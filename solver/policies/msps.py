"""Evict what is cheapest to make again for its bytes, evicted ancestors counted.

Also called: MSPS, memory saved per second; h_MSPS.
Paper: X. Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning",
ASPLOS 2020, https://doi.org/10.1145/3373376.3378505, as restated by M. Kirisame et al.,
"Dynamic Tensor Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
Solves: no stated problem; a rule for each moment at which memory is full. The value of least
(c + cost of the evicted values that it would have to be made from) / bytes goes, c being its
op's cost. The policy runs over the captured graph; its runs are the plan, pruned by default,
see `plan`.
Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values
and a walk over the evicted ones around: quadratic where much is evicted.
Shortcomings: blind to recency, so it may evict again at once what it has just had recomputed,
and to what needs the value in turn; no bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.solver.policies.evicted import EvictedReach
from remat.solver.policies.eviction import Books, Policy, Scores, Values
from remat.solver.policies.plan import PolicyPlanner
from remat.solver.problem import Problem


class MspsPolicy(Policy):
    """Least (c + evicted ancestors) / bytes."""

    def __init__(self, problem: Problem, room_bytes: int) -> None:
        super().__init__(problem, room_bytes, around=EvictedReach(problem, ancestors_only=True))

    def scores(self, books: Books, values: Values) -> Scores:
        """In microseconds a byte."""
        return self.with_neighbours_us(books, values) / books.size_bytes[values]


@dataclass(frozen=True)
class Msps(PolicyPlanner):
    """Plans by memory saved per second of recomputation."""

    name = "msps"
    policy = MspsPolicy
