"""Everything that backward reads goes to the host and comes back.

Also called: vDNN_all, offload all.
Paper: M. Rhu, N. Gimelshein, J. Clemons, A. Zulfiqar, S. W. Keckler, "vDNN: Virtualized Deep Neural
Networks for Scalable, Memory-Efficient Neural Network Design", 2016,
https://arxiv.org/abs/1602.08124.
Solves: no stated problem; the budget only decides whether anything leaves at all, and how early
it comes back. Nothing is recomputed but what is too small to send.
Optimal: where the step fits as it is, or its copies hide behind it whole. Cost: O(copies · ops).
Shortcomings: sends what need not leave, so the device waits for the link wherever that is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from remat.graph_capture.graph import TrainingGraph
from remat.solver.offload.policy import LEAST_BYTES, check_knobs, solve_choices
from remat.solver.offload.released import Choice, Saved
from remat.solver.result import Result
from remat.solver.search import Listener


@dataclass(frozen=True)
class SwapAll:
    """Solver that hosts everything.

    Attributes
    ----------
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    copies: ClassVar[bool] = True

    least_bytes: int = LEAST_BYTES
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_knobs(self.least_bytes)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else all on the host, if that does.

        Raises
        ------
        SolverError : the graph has no links.
        """
        return solve_choices(self, "swap_all", graph, budget_bytes, swap_all_choices)


def swap_all_choices(saved: Saved) -> Iterator[Choice]:
    """The one choice; none where nothing is large enough."""
    if saved.large:
        yield Choice(frozenset(saved.large))
