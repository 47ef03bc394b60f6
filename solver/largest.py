"""Evict what is largest.

Also called: greedy by size, h_size.
Paper: as a rematerialization policy in M. Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
Solves: no stated problem; a rule for each moment at which memory is full. The value of least
1 / bytes goes, of equals the one made first in the captured order. The policy runs over the
captured graph; its runs are the plan, pruned by default, see `online_plan`.
Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values.
Shortcomings: blind to costs and to recency, so it may evict again at once what it has just
had recomputed; fewest evictions, but long recomputations; no bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.eviction import Books, Policy, Scores, Values
from remat.solver.online_plan import plan_online
from remat.solver.result import Result
from remat.solver.search import Listener, Search


@dataclass(frozen=True)
class Largest:
    """Plans by size.

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
        search = Search(graph, budget_bytes, "largest", self.time_limit_s, self.progress)
        search.options = {"prune": self.prune}
        return plan_online(search, LargestPolicy, prune=self.prune)


class LargestPolicy(Policy):
    """Least 1 / bytes."""

    def scores(self, books: Books, values: Values) -> Scores:
        """In 1 / bytes."""
        return 1.0 / books.size_bytes[values]
