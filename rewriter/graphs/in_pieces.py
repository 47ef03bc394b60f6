"""Traces a step with the regions in pieces that a schedule runs so.

Pieces that are exact are compared with eager on the device that will train, unless this process has
done so. The plan may have been made elsewhere, or for a device of the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.errors import RewriteError, ScheduleError, option
from remat.graph_capture.prices.kept_bits import kept_bits
from remat.graph_capture.splitting.regions import AND, COUNTS, find_regions
from remat.graph_capture.splitting.same_bits import is_known_to_give_them
from remat.graph_capture.tracing.one_trace import Trace, with_pieces
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.trace import trace_recipe
from remat.schedules.schedule import Pieces, Schedule


def trace_in_pieces(
    model: nn.Module, recipe: Recipe, schedule: Schedule, captured: Trace | None = None
) -> Trace:
    """A trace of the step that `schedule` is of.

    Parameters
    ----------
    captured : a trace with the recipe, whole and not compiled, which is used up; None to trace.

    Raises
    ------
    RewriteError : pieces that are to be exact give other bits than eager here.
    ScheduleError : the step has no such region, or no region runs in that many pieces.
    """
    _require_counts(schedule)
    facts = schedule.graph_hash, recipe.device
    unknown = [
        one
        for one in schedule.pieces
        if one.exact and not is_known_to_give_them(*facts, one.region, one.pieces)
    ]
    is_usable = captured is not None and not captured.compiled and not captured.floats
    if unknown:
        whole = dataclasses.replace(recipe, pieces=())
        known = captured if captured and is_usable else trace_recipe(model, whole)
        _require_eagers_bits(known, unknown)
    pieces = tuple(
        (part, one.pieces, one.exact) for one in schedule.pieces for part in one.region.split(AND)
    )
    if captured and is_usable and pieces:
        return with_pieces(captured, pieces)
    return trace_recipe(model, dataclasses.replace(recipe, pieces=pieces))


def _require_counts(schedule: Schedule) -> None:
    """Refuse numbers of pieces that no plan has: the graph's hash does not cover them."""
    for one in schedule.pieces:
        if one.pieces not in COUNTS:
            raise ScheduleError(
                f"this plan runs {one.region} in {one.pieces} pieces; regions run in "
                f"{', '.join(map(str, COUNTS))}: solve again"
            )


def _require_eagers_bits(captured: Trace, wanted: Iterable[Pieces]) -> None:
    has_them = kept_bits(meter_of(captured.recipe.device))
    for one in wanted:
        for found in find_regions(captured, is_exact=True, names=one.region.split(AND)):
            found.set_pieces(one.pieces)
            if not has_them(found):
                raise RewriteError(
                    f"{found.name} in {found.pieces} pieces gives other bits than eager here, as "
                    "kernels sum a part of the rows in another order: plan here, or with "
                    f"{option('split', 'tolerance')} or {option('split', 'none')}"
                )
