"""Evict what is cheapest to make again for its bytes, evicted ancestors counted.

Also called: MSPS, memory saved per second; h_MSPS.
Paper: X. Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning",
ASPLOS 2020, https://doi.org/10.1145/3373376.3378505, as restated by M. Kirisame et al.,
"Dynamic Tensor Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
Solves: no stated problem; a rule for each moment at which memory is full. The value of least
(c + cost of the evicted values that it would have to be made from) / bytes goes, c being its
op's cost. The policy runs over the captured graph; its runs are the plan, pruned by default,
see `online_plan`.
Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values
and a walk over the evicted ones around: quadratic where much is evicted.
Shortcomings: blind to recency, so it may evict again at once what it has just had recomputed,
and to what needs the value in turn; no bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.solver.eviction import Books, Policy, Scores, Values
from remat.solver.neighbourhood import EvictedReach
from remat.solver.online_plan import plan_online
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search


@dataclass(frozen=True)
class Msps:
    """Plans by memory saved per second of recomputation.

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
        search = Search(graph, budget_bytes, "msps", self.time_limit_s, self.progress)
        search.options = {"prune": self.prune}
        return plan_online(search, MspsPolicy, prune=self.prune)


class MspsPolicy(Policy):
    """Least (c + evicted ancestors) / bytes."""

    def __init__(self, problem: Problem, room_bytes: int) -> None:
        super().__init__(problem, room_bytes, around=EvictedReach(problem, ancestors_only=True))

    def scores(self, books: Books, values: Values) -> Scores:
        """In microseconds a byte."""
        return self.with_neighbours_us(books, values) / books.size_bytes[values]
