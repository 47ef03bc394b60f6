"""A schedule of segments between lower sets, as a start where one cut leaves the gap open.

On recurrent nets, whose ops are small and many, repair starts far above it.
"""

from __future__ import annotations

from remat.solver.lower_set import LowerSet
from remat.solver.search import Search

PART = 0.2
"""Part of the time left that this may take."""


def take_segments(search: Search) -> None:
    """Offer what sequences of lower sets come to within the budget."""
    if search.out_of_time():
        return
    search.say("segments between lower sets")
    found = LowerSet(time_limit_s=PART * search.left_s).solve(search.graph, search.budget_bytes)
    if found.schedule is not None:
        search.offer_schedule(found.schedule)
