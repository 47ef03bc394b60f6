"""Schedules of other solvers, as starts for a search where one cut leaves the gap open.

The policies plan within the budget in about a second on thousands of ops. Near the least
peak they now and then fit where repair does not; and nothing that starts from their
schedules ends above them.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.solver.contract import Solver
from remat.solver.policies.dtr import Dtr
from remat.solver.policies.largest import Largest
from remat.solver.policies.msps import Msps
from remat.solver.search import Search
from remat.solver.segments.lower_set import LowerSet
from remat.solver.stopping import START

FEW_OPS = 3000
"""Beyond this many ops `largest`, which scans all that is live each time, takes too long."""


def take_policies(search: Search) -> None:
    """Offer what each policy plans within the budget."""
    for policy in (Dtr, Msps, Largest):
        if policy is Largest and search.problem.n_ops > FEW_OPS:
            continue
        take_start(search, policy, f"planning as {policy.__name__.lower()} does")


def take_start(search: Search, solver: Callable[..., Solver], doing: str) -> None:
    """Offer what a solver finds in a part of the time left, if there is any."""
    if search.out_of_time():
        return
    search.say(doing)
    found = solver(time_limit_s=START.of(search.left_s)).solve(search.graph, search.budget_bytes)
    if found.schedule is not None:
        search.offer_schedule(found.schedule)


def take_segments(search: Search) -> None:
    """Offer what sequences of lower sets come to within the budget."""
    take_start(search, LowerSet, "segments between lower sets")
