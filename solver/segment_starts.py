"""A schedule of segments between lower sets, as a start where one cut leaves the gap open.

On recurrent nets, whose ops are small and many, repair starts far above it.
"""

from __future__ import annotations

from remat.solver.cuts.starts import take_start
from remat.solver.search import Search
from remat.solver.segments.lower_set import LowerSet


def take_segments(search: Search) -> None:
    """Offer what sequences of lower sets come to within the budget."""
    take_start(search, LowerSet, "segments between lower sets")
