"""What a head in pieces would need, where its pieces give other bits than eager on this device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import torch

from remat.formats import bytes_text
from remat.graph_capture.chunking.regions import COUNTS, Found, regions_asked
from remat.graph_capture.chunking.same_bits import gives_eagers_bits
from remat.graph_capture.devices.table import CPU
from remat.graph_capture.errors import option
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import Trace
from remat.solver.result import Result

Priced = Callable[[Trace], TrainingGraph]
Solved = Callable[[TrainingGraph], Result]


def naming_tolerance(
    result: Result, traced: Trace, graph: TrainingGraph, priced: Priced, solved: Solved
) -> Result:
    """`result`; where nothing fits and heads stay whole for their bits, with what pieces need.

    It takes another solve, of the graph whose pieces may sum in another order.

    Parameters
    ----------
    graph : priced, that of `traced`. priced, solved : how it was priced, and solved for.
    """
    if result.schedule is not None or not result.least_feasible_bytes:
        return result
    whole = [one for one in _exact_pieces(traced) if one.name not in _regions(graph)]
    if not whole:
        return result
    recipe = dataclasses.replace(traced.recipe, split="tolerance")
    found = solved(priced(dataclasses.replace(traced, recipe=recipe)))
    least_bytes = found.least_feasible_bytes if found.schedule is None else found.peak_bytes
    if not least_bytes or least_bytes >= result.least_feasible_bytes:
        return result
    text = (
        f"{option('split', 'tolerance')} (a schedule of {bytes_text(least_bytes)} is known, with "
        "sums in another order)"
    )
    if _are_exact_on_one_thread(whole, traced.recipe.device):
        text += ", OMP_NUM_THREADS=1 (on one thread the loss in pieces has eager's bits)"
    return msgspec.structs.replace(result, otherwise=text)


def _exact_pieces(traced: Trace) -> list[Found]:
    """The regions that were to run in pieces if these give eager's bits."""
    if traced.recipe.is_modelled:
        return []
    return [one for one in regions_asked(traced) if one.is_exact]


def _regions(graph: TrainingGraph) -> set[str]:
    return {region.name for region in graph.regions}


def _are_exact_on_one_thread(whole: list[Found], device: str) -> bool:
    """Whether kernels sum in eager's order where no thread takes a part of the rows."""
    threads = torch.get_num_threads()
    if device != CPU or threads == 1:
        return False
    torch.set_num_threads(1)
    try:
        return any(_has_exact_pieces(one) for one in whole)
    finally:
        torch.set_num_threads(threads)


def _has_exact_pieces(found: Found) -> bool:
    for pieces in COUNTS:
        found.set_pieces(pieces)
        if gives_eagers_bits(found):
            return True
    return False
