"""Traces a step with the regions in pieces that a schedule runs so.

Pieces that are exact are compared with eager on the device that will train, unless this process has
done so. The plan may have been made elsewhere, or for a device of the table.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.splitting.regions import AND, find_regions
from remat.graph_capture.splitting.same_bits import gives_eagers_bits, is_known_to_give_them
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.trace import Trace, trace_recipe
from remat.schedules.schedule import Schedule


def trace_in_pieces(model: nn.Module, recipe: Recipe, schedule: Schedule) -> Trace:
    """A trace of the step that `schedule` is of.

    Raises
    ------
    RewriteError : pieces that are to be exact give other bits than eager here.
    CaptureError : the step has no such region.
    """
    exact = [one for one in schedule.pieces if one.exact]
    facts = schedule.captured_hash, recipe.device
    if not all(is_known_to_give_them(*facts, one.region, one.pieces) for one in exact):
        _require_eagers_bits(trace_recipe(model, dataclasses.replace(recipe, pieces=())), schedule)
    pieces = tuple(
        (head, one.pieces, one.exact) for one in schedule.pieces for head in one.region.split(AND)
    )
    return trace_recipe(model, dataclasses.replace(recipe, pieces=pieces))


def _require_eagers_bits(captured: Trace, schedule: Schedule) -> None:
    wanted = {one.region: one.pieces for one in schedule.pieces if one.exact}
    for found in find_regions(captured, is_exact=True):
        if found.name not in wanted:
            continue
        found.set_pieces(wanted[found.name])
        if not gives_eagers_bits(found):
            raise RewriteError(
                f"{found.name} in {found.pieces} pieces gives other bits than eager here, as "
                "kernels sum a part of the rows in another order: plan here, or with "
                "split='tolerance' or split='none'"
            )
