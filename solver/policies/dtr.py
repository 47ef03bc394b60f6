"""Dynamic tensor rematerialization: evict what is cheap, large and long unused.

Also called: DTR, h_DTR (full), h_DTR^eq (eq), h_DTR^local (local).
Paper: M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen,
Z. Tatlock, "Dynamic Tensor Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
Solves: no stated problem; a rule for each moment at which memory is full. The value of
least (c + cost of its evicted neighbourhood) / (bytes x staleness) goes, c being its op's
cost. The neighbourhood follows paths of evicted values (full), is made of union-find classes
with the splitting approximation (eq), or is left out (local). Values that no op reads later
are evicted at once (the paper's eager eviction). The policy runs over the captured graph; its
runs are the plan, pruned by default, see `plan`.
Optimal only where nothing need be evicted. On a chain of n equal ops the paper proves O(n)
runs in O(sqrt n) memory for a simplified rule. Cost: for each eviction a scan of the live
values, and for full a walk over the evicted ones around: quadratic where much is evicted.
Shortcomings: uses no knowledge of the future; values wanted at the end (weight gradients) grow
stale and are evicted like others; no bound; thrashes at small budgets, and then gives up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.policies.evicted import EvictedClasses, EvictedReach, Neighbourhood
from remat.solver.policies.eviction import Books, Policy, Scores, Values
from remat.solver.policies.plan import plan_online
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search

Variant = Literal["full", "eq", "local"]
VARIANTS: tuple[Variant, ...] = ("full", "eq", "local")


@dataclass(frozen=True)
class Dtr:
    """Plans by DTR.

    Attributes
    ----------
    variant : ``full``, ``eq`` or ``local``: what counts as evicted neighbourhood.
    prune : offer the sequence without its superfluous recomputations too.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    variant: Variant = "eq"
    prune: bool = True
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise SolverError(f"unknown variant '{self.variant}'; there are {', '.join(VARIANTS)}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """What the policy does within `budget_bytes`; no bound beyond every op once."""
        search = Search.of(self, "dtr", graph, budget_bytes)
        return plan_online(search, self._policy, prune=self.prune)

    def _policy(self, problem: Problem, room_bytes: int) -> Policy:
        return DtrPolicy(problem, room_bytes, around=neighbourhood(problem, self.variant))


def neighbourhood(problem: Problem, variant: Variant) -> Neighbourhood | None:
    """What `variant` counts as a value's evicted neighbourhood."""
    if variant == "eq":
        return EvictedClasses(problem)
    return EvictedReach(problem) if variant == "full" else None


class DtrPolicy(Policy):
    """Least (c + neighbourhood) / (bytes x staleness)."""

    def scores(self, books: Books, values: Values) -> Scores:
        """In microseconds a byte and microsecond."""
        weight = books.size_bytes[values] * books.staleness_us(values)
        return self.with_neighbours_us(books, values) / weight
