"""Large heads and MLPs in chunks, on a device that is here: measured only where they may help.

Timing them takes longer than the rest of a small step. Unless whole ops fit at next to no cost,
chunks are first solved as if they took no longer, and measured if that wins more than the gap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from remat.budgets import Budget
from remat.formats import bytes_text
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import option
from remat.graph_capture.graph import TrainingGraph
from remat.progress import Stopwatch
from remat.schedules.outcome import Result
from remat.solved import Solved
from remat.solver.stopping import DEFAULT_GAP

if TYPE_CHECKING:
    from remat.graph_capture.chunking.regions import RegionCandidate
    from remat.graph_capture.tracing.traced_step import Trace


class _SolveFor(Protocol):
    def __call__(self, graph: TrainingGraph, /, *, at_hand: Result | None = None) -> Result:
        """The outcome; `at_hand` is that of the graph with whole ops, where it is known."""
        ...


def may_wait(traced: Trace, budget: Budget) -> bool:
    """Whether chunks need not be timed at once, as nobody asked for them."""
    # The least peak of all is one in chunks. Modelled costs are there at once.
    is_asked = traced.recipe.split is not None or budget.kind == "min"
    return not is_asked and not traced.recipe.is_modelled


def is_enough(whole: Result) -> bool:
    """Whether what chunks could win is within the gap that ends a search."""
    return whole.schedule is not None and whole.overhead <= DEFAULT_GAP


def solved_at_need(
    traced: Trace, graph: TrainingGraph, solve_for: _SolveFor,
    with_measured_chunks: Callable[[TrainingGraph], TrainingGraph], stages: Stopwatch,
) -> Solved:  # fmt: skip
    """The best plan of `graph`, without chunks; or of the graph with them, if they may help."""
    whole = solve_for(graph)
    if not _may_help(traced, graph, whole, solve_for, stages):
        return Solved(graph, whole)
    in_chunks = with_measured_chunks(graph)
    if not in_chunks.regions:
        return Solved(graph, whole)
    return Solved(in_chunks, solve_for(in_chunks, at_hand=whole))  # begins with the whole ops' plan


def _may_help(
    traced: Trace, graph: TrainingGraph, whole: Result, solve_for: _SolveFor, stages: Stopwatch
) -> bool:
    from remat.graph_capture.costs.op_costs import with_optimistic_chunks

    if whole.schedule is None:
        return True
    if is_enough(whole):
        return False
    with stages.stage("solve", "looking at what could run in chunks"):
        hoped = with_optimistic_chunks(traced, graph)  # if that is no faster, measuring is in vain
    if not hoped.regions:
        return False
    best = solve_for(hoped, at_hand=whole).schedule
    return best is not None and bool(best.chunks)


def naming_tolerance(
    result: Result, traced: Trace, graph: TrainingGraph,
    cost_model: Callable[[Trace], TrainingGraph], solved: Callable[[TrainingGraph], Result],
) -> Result:  # fmt: skip
    """`result`; where nothing fits and heads stay whole for their bits, with what chunks need."""
    if result.schedule is not None or not result.least_feasible_bytes:
        return result
    in_chunks = {region.name for region in graph.regions}
    if not (whole := [one for one in _exact_chunks(traced) if one.name not in in_chunks]):
        return result
    # Another solve, of the graph whose chunks may sum in another order.
    recipe = dataclasses.replace(traced.recipe, split="tolerance")
    found = solved(cost_model(dataclasses.replace(traced, recipe=recipe)))
    least_bytes = found.least_feasible_bytes if found.schedule is None else found.peak_bytes
    if not least_bytes or least_bytes >= result.least_feasible_bytes:
        return result
    known = f"the lowest known peak is then {bytes_text(least_bytes)}, with sums in another order"
    text = f"{option('split', 'tolerance')} ({known})"
    if _are_exact_on_one_thread(whole, traced.recipe.device):
        text += ", OMP_NUM_THREADS=1 (on one thread the loss in chunks has eager's bits)"
    return msgspec.structs.replace(result, otherwise=text)


def _exact_chunks(traced: Trace) -> list[RegionCandidate]:
    """The regions that were to run in chunks if these give eager's bits."""
    if traced.recipe.is_modelled:  # no bits are compared on a device that is not here
        return []
    from remat.graph_capture.chunking.regions import requested_regions

    return [one for one in requested_regions(traced) if one.is_exact]


def _are_exact_on_one_thread(whole: list[RegionCandidate], device: str) -> bool:
    import torch

    threads = torch.get_num_threads()  # on one, kernels may sum in eager's order
    if device != CPU or threads == 1:
        return False
    torch.set_num_threads(1)
    try:
        return any(_has_exact_chunks(one) for one in whole)
    finally:
        torch.set_num_threads(threads)


def _has_exact_chunks(found: RegionCandidate) -> bool:
    from remat.graph_capture.chunking.regions import COUNTS
    from remat.graph_capture.chunking.same_bits import matches_eager_bitwise

    for chunks in COUNTS:
        found.set_chunks(chunks)
        if matches_eager_bitwise(found):
            return True
    return False
