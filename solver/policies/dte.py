"""Dynamic tensor evicting: DTR's rule with addresses, so that holes grow together.

Also called: DTE, the policy of MegTaiChi; the sublinear memory of MegEngine's dynamic graphs.
Paper: Z. Hu, J. Xiao, Z. Deng, M. Li, K. Zhang, X. Zhang, K. Meng, N. Sun, G. Tan,
"MegTaiChi: Dynamic Tensor-based Memory Management Optimization for DNN Training", ICS 2022,
https://doi.org/10.1145/3524059.3532394.
Solves: no stated problem; a rule for each moment at which no hole is large enough. The value of
least (c_nb + 10^-3) 1.0001^(times recomputed) / ((MiB + free MiB on both sides)(dt + 10^-3))
goes, c_nb being its cost with the evicted classes around, dt its staleness, until one hole
holds what is asked for. Memory is an `Arena` with best fit, as large as the budget leaves.
The policy runs over the captured graph; its runs are the plan, pruned by default, see `plan`.
Optimal only where nothing need be evicted. Cost: for each eviction a scan of the live values.
Shortcomings: those of `dtr`; evicts more than bytes alone ask for where memory is fragmented,
which the plan's peak, counted in bytes, does not show; no bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.solver.policies.arena import Arena
from remat.solver.policies.evicted import EvictedClasses
from remat.solver.policies.eviction import Books, Policy, Scores, Values
from remat.solver.policies.plan import PolicyPlanner
from remat.solver.problem import Problem

MIB = 1 << 20
OFFSET = 1e-3
RERUN_FACTOR = 1.0001


class DtePolicy(Policy):
    """Least cost around for the bytes of the hole that the eviction would make."""

    def __init__(self, problem: Problem, room_bytes: int) -> None:
        self.arena = Arena(room_bytes, problem.n_values + 1)
        super().__init__(problem, room_bytes, memory=self.arena, around=EvictedClasses(problem))

    def scores(self, books: Books, values: Values) -> Scores:
        """In microseconds a MiB and microsecond."""
        hole_mib = (books.size_bytes[values] + self.arena.beside_bytes[values]) / MIB
        idle_us = books.clock_us - books.used_us[values] + OFFSET
        cost_us = self.with_neighbours_us(books, values) + OFFSET
        return cost_us * RERUN_FACTOR ** books.reruns[values] / (hole_mib * idle_us)


@dataclass(frozen=True)
class Dte(PolicyPlanner):
    """Plans by DTE."""

    name = "dte"
    policy = DtePolicy
