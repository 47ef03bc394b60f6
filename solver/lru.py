"""Evict what has not been used for longest.

Also called: LRU, least recently used, h_LRU.
Paper: as a rematerialization policy in M. Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
Solves: no stated problem; a rule for each moment at which memory is full. The value of least
1 / staleness goes. The policy runs over the captured graph; its runs are the plan, pruned by
default, see `online_plan`.
Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values.
Shortcomings: blind to costs and sizes; in backward what is oldest is needed last, which suits
it, but what it evicts in forward makes long chains of recomputations; no bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.eviction import Books, Policy, Scores, Values
from remat.solver.online_plan import plan_online
from remat.solver.result import Result
from remat.solver.search import Listener, Search


@dataclass(frozen=True)
class Lru:
    """Plans by LRU.

    Attributes
    ----------
    prune : offer the sequence without its superfluous recomputations too.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    prune: bool = True
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """What the policy does within `budget_bytes`; no bound beyond every op once."""
        search = Search(graph, budget_bytes, "lru", self.time_limit_s, self.progress)
        search.options = {"prune": self.prune}
        return plan_online(search, LruPolicy, prune=self.prune)


class LruPolicy(Policy):
    """Least 1 / staleness."""

    def scores(self, books: Books, values: Values) -> Scores:
        """In 1 / microseconds."""
        return 1.0 / books.staleness_us(values)
