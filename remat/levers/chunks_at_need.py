"""Large heads and MLPs in chunks, on a device that is here: measured only where they may help.

To time chunks and to compare their bits takes longer than all else together that is measured of a
small step. A plan of whole ops that costs next to nothing needs no chunks. For any other, they are
first solved for as if they took no longer than the whole. Only if that is faster by more than the
gap, or if no plan of whole ops fits, are they measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from remat.budgets import Budget
from remat.graph_capture.graph import TrainingGraph
from remat.progress import Stopwatch
from remat.solved import Solved
from remat.solver.result import Result
from remat.solver.stopping import DEFAULT_GAP

if TYPE_CHECKING:
    from remat.graph_capture.tracing.trace import Trace


class _SolveFor(Protocol):
    def __call__(self, graph: TrainingGraph, /, *, at_hand: Result | None = None) -> Result:
        """The outcome; `at_hand` is that of the graph with whole ops, where it is known."""
        ...


def may_wait(traced: Trace, budget: Budget) -> bool:
    """Whether chunks need not be timed at once, as nobody asked for them."""
    # The least peak of all is one in chunks. Modelled costs are there at once.
    is_asked = traced.recipe.split is not None or budget.kind == "min"
    return not is_asked and not traced.recipe.is_modelled


def solved_at_need(
    traced: Trace,
    graph: TrainingGraph,
    solve_for: _SolveFor,
    with_measured_chunks: Callable[[TrainingGraph], TrainingGraph],
    stages: Stopwatch,
) -> Solved:
    """The best plan of `graph`, without chunks; or of the graph with them, if they may help."""
    whole = solve_for(graph)
    if not _may_help(traced, graph, whole, solve_for, stages):
        return Solved(graph, whole)
    in_chunks = with_measured_chunks(graph)
    if not in_chunks.regions:
        return Solved(graph, whole)
    # The plan of whole ops is one of this graph too, and the solve begins with it.
    return Solved(in_chunks, solve_for(in_chunks, at_hand=whole))


def _may_help(
    traced: Trace, graph: TrainingGraph, whole: Result, solve_for: _SolveFor, stages: Stopwatch
) -> bool:
    from remat.graph_capture.costs.op_costs import with_optimistic_chunks

    if whole.schedule is None:
        return True
    # What chunks could win is within the gap that ends a search.
    if whole.overhead <= DEFAULT_GAP:
        return False
    with stages.stage("solve", "looking at what could run in chunks"):
        # As if chunks took no longer than the whole: if that is no faster, measuring is in vain.
        hoped = with_optimistic_chunks(traced, graph)
    if not hoped.regions:
        return False
    best = solve_for(hoped, at_hand=whole).schedule
    return best is not None and bool(best.chunks)
