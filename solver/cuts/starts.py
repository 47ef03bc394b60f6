"""Schedules of other solvers, as starts for a search where one cut leaves the gap open.

Near the least peak, policies now and then fit where repair does not; and nothing that starts from
their schedules ends above them. They take some .1 s on a hundred ops, and where memory is full in
several places up to 30 s on a thousand.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.solver.contract import Solver
from remat.solver.cuts.from_above import take_from_above
from remat.solver.cuts.way_down import take_least_peak
from remat.solver.policies.dtr import Dtr
from remat.solver.policies.largest import Largest
from remat.solver.policies.msps import Msps
from remat.solver.search import Search
from remat.solver.segments.lower_set import LowerSet
from remat.solver.state import State
from remat.solver.stopping import START

QUICK_OPS = 128
"""On graphs of at most so many ops policies take less than the way from above."""
FEW_OPS = 3000
"""Beyond this many ops `largest`, which scans all that is live each time, takes too long."""


def take_first(
    search: Search, plain: State, *, is_patient: bool, with_policies: bool = False
) -> None:
    """Where nothing fits yet, offer what may: the quickest first, until something does.

    Ways down to the least peak take 5 s at most on a narrow graph of 1,000 ops, and end within the
    budget on some; they also name what an infeasible result says.
    """
    is_quick = search.problem.n_ops <= QUICK_OPS
    if search.best is None and search.lowest is None and not search.is_large:
        take_least_peak(search, plain)
    if search.best is None and with_policies and is_quick:
        take_policies(search)
    if search.best is None:
        take_from_above(search, plain, is_patient=is_patient)


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
