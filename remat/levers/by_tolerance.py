"""What a head in chunks would need, where its chunks give other bits than eager on this device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import torch

from remat.formats import bytes_text
from remat.graph_capture.chunking.regions import COUNTS, RegionCandidate, requested_regions
from remat.graph_capture.chunking.same_bits import matches_eager_bitwise
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import option
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import Trace
from remat.solver.result import Result

_CostModel = Callable[[Trace], TrainingGraph]
_Solved = Callable[[TrainingGraph], Result]


def naming_tolerance(
    result: Result, traced: Trace, graph: TrainingGraph, cost_model: _CostModel, solved: _Solved
) -> Result:
    """`result`; where nothing fits and heads stay whole for their bits, with what chunks need."""
    if result.schedule is not None or not result.least_feasible_bytes:
        return result
    whole = [one for one in _exact_chunks(traced) if one.name not in _regions(graph)]
    if not whole:
        return result
    # Another solve, of the graph whose chunks may sum in another order.
    recipe = dataclasses.replace(traced.recipe, split="tolerance")
    found = solved(cost_model(dataclasses.replace(traced, recipe=recipe)))
    least_bytes = found.least_feasible_bytes if found.schedule is None else found.peak_bytes
    if not least_bytes or least_bytes >= result.least_feasible_bytes:
        return result
    text = (
        f"{option('split', 'tolerance')} (a schedule of {bytes_text(least_bytes)} is known, with "
        "sums in another order)"
    )
    if _are_exact_on_one_thread(whole, traced.recipe.device):
        text += ", OMP_NUM_THREADS=1 (on one thread the loss in chunks has eager's bits)"
    return msgspec.structs.replace(result, otherwise=text)


def _exact_chunks(traced: Trace) -> list[RegionCandidate]:
    """The regions that were to run in chunks if these give eager's bits."""
    # On a device that is not here no bits are compared, so none keep a head whole.
    if traced.recipe.is_modelled:
        return []
    return [one for one in requested_regions(traced) if one.is_exact]


def _regions(graph: TrainingGraph) -> set[str]:
    return {region.name for region in graph.regions}


def _are_exact_on_one_thread(whole: list[RegionCandidate], device: str) -> bool:
    # On one thread no other takes a part of the rows, so kernels may sum in eager's order.
    threads = torch.get_num_threads()
    if device != CPU or threads == 1:
        return False
    torch.set_num_threads(1)
    try:
        return any(_has_exact_chunks(one) for one in whole)
    finally:
        torch.set_num_threads(threads)


def _has_exact_chunks(found: RegionCandidate) -> bool:
    for chunks in COUNTS:
        found.set_chunks(chunks)
        if matches_eager_bitwise(found):
            return True
    return False
