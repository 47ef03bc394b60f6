"""Policies that evict what costs least to lose: DTR, by size, by memory saved per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.policies.eviction import (
    EvictedClasses,
    EvictedReach,
    Neighbourhood,
    Policy,
    Scores,
    ValueIds,
    ValueStatistics,
)
from remat.solver.policies.online import PolicyPlanner, plan_online
from remat.solver.problem import Problem
from remat.solver.search import Listener, Search

_Variant = Literal["full", "eq", "local"]
_VARIANTS: tuple[_Variant, ...] = ("full", "eq", "local")


@dataclass(frozen=True)
class Dtr:
    """Dynamic tensor rematerialization: evict what is cheap, large and long unused.

    Also called: DTR, h_DTR (full), h_DTR^eq (eq), h_DTR^local (local).
    Paper: M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen,
    Z. Tatlock, "Dynamic Tensor Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
    Solves: no stated problem; a rule for each moment at which memory is full. The value of
    least (c + cost of its evicted neighbourhood) / (bytes x staleness) goes, c being its op's
    cost. The neighbourhood follows paths of evicted values (full), is made of union-find classes
    with the splitting approximation (eq), or is left out (local). Values that no op reads later
    are evicted at once (the paper's eager eviction). The policy runs over the captured graph; its
    runs are the plan, pruned by default, see `plan_online`.
    Optimal only where nothing need be evicted. On a chain of n equal ops the paper proves O(n)
    runs in O(sqrt n) memory for a simplified rule. Cost: for each eviction a scan of the live
    values, and for full a walk over the evicted ones around: quadratic where much is evicted.
    Shortcomings: uses no knowledge of the future; values wanted at the end (weight gradients) grow
    stale and are evicted like others; no bound; thrashes at small budgets, and then gives up.

    Attributes
    ----------
    variant : ``full``, ``eq`` or ``local``: what counts as evicted neighbourhood.
    prune : offer the sequence without its superfluous recomputations too.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    variant: _Variant = "eq"
    prune: bool = True
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.variant not in _VARIANTS:
            raise SolverError(f"unknown variant '{self.variant}'; there are {', '.join(_VARIANTS)}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "dtr", graph, budget_bytes)
        return plan_online(search, self.make, prune=self.prune)

    def make(self, problem: Problem, room_bytes: int) -> Policy:
        return DtrPolicy(problem, room_bytes, around=neighbourhood(problem, self.variant))


def neighbourhood(problem: Problem, variant: _Variant) -> Neighbourhood | None:
    """What `variant` counts as a value's evicted neighbourhood; None for ``local``."""
    if variant == "eq":
        return EvictedClasses(problem)
    return EvictedReach(problem) if variant == "full" else None


class DtrPolicy(Policy):
    """Least (c + neighbourhood) / (bytes x staleness)."""

    def scores(self, books: ValueStatistics, values: ValueIds) -> Scores:
        """In microseconds a byte and microsecond."""
        weight = books.size_bytes[values] * books.staleness_us(values)
        return self.with_neighbours_us(books, values) / weight


class LargestPolicy(Policy):
    """Least 1 / bytes."""

    def scores(self, books: ValueStatistics, values: ValueIds) -> Scores:
        """In 1 / bytes."""
        return 1.0 / books.size_bytes[values]


@dataclass(frozen=True)
class Largest(PolicyPlanner):
    """Evict what is largest.

    Also called: greedy by size, h_size.
    Paper: as a rematerialization policy in M. Kirisame et al., "Dynamic Tensor
    Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
    Solves: no stated problem; a rule for each moment at which memory is full. The value of least
    1 / bytes goes, of equals the one made first in the captured order. The policy runs over the
    captured graph; its runs are the plan, pruned by default, see `plan_online`.
    Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values.
    Shortcomings: blind to costs and to recency, so it may evict again at once what it has just
    had recomputed; fewest evictions, but long recomputations; no bound.
    """

    name = "largest"
    policy = LargestPolicy


class MspsPolicy(Policy):
    """Least (c + evicted ancestors) / bytes."""

    def __init__(self, problem: Problem, room_bytes: int) -> None:
        super().__init__(problem, room_bytes, around=EvictedReach(problem, ancestors_only=True))

    def scores(self, books: ValueStatistics, values: ValueIds) -> Scores:
        """In microseconds a byte."""
        return self.with_neighbours_us(books, values) / books.size_bytes[values]


@dataclass(frozen=True)
class Msps(PolicyPlanner):
    """Evict what is cheapest to make again for its bytes, evicted ancestors counted.

    Also called: MSPS, memory saved per second; h_MSPS.
    Paper: X. Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning",
    ASPLOS 2020, https://doi.org/10.1145/3373376.3378505, as restated by M. Kirisame et al.,
    "Dynamic Tensor Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616.
    Solves: no stated problem; a rule for each moment at which memory is full. The value of least
    (c + cost of the evicted values that it would have to be made from) / bytes goes, c being its
    op's cost. The policy runs over the captured graph; its runs are the plan, pruned by default,
    see `plan_online`.
    Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values
    and a walk over the evicted ones around: quadratic where much is evicted.
    Shortcomings: blind to recency, so it may evict again at once what it has just had recomputed,
    and to what needs the value in turn; no bound.
    """

    name = "msps"
    policy = MspsPolicy
