"""One plan of a cache for a range: as wide as the model, the budget and the batch allow."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import nn

from remat.graph_capture.errors import CaptureError, DifferenceError, TooLargeError
from remat.graph_capture.shapes.guards import RangeError
from remat.graph_capture.shapes.ranges import Dynamic
from remat.graph_capture.tracing.signature import Signature
from remat.ranges.varying import VaryingSizes, Wanted
from remat.rewriter.user_module.ranged import RangedModule

MOST_PARTS = 4
"""Of a range in which a guard changes its answer more often, sizes have a plan each."""
MOST_NARROWED = 8
"""How often a range is narrowed to what a guard allows, before sizes have a plan each."""


def planned_over(
    sizes: VaryingSizes, batch: Any, make: Callable[..., RangedModule]
) -> RangedModule | None:
    """A plan for a range that holds a batch; None where its sizes need a plan each.

    Parameters
    ----------
    make : `rematerialize_over` of this batch; takes the ranges.

    Raises
    ------
    TooLargeError : not even the batch fits; or what the user has said is to come does not.
    """
    why, too_large = "", None
    while True:
        try:
            planned, failed = _within_guards(sizes.wanted(batch), batch, make)
        except TooLargeError as error:
            planned, failed, too_large = None, "", too_large or error
        if planned is not None:
            sizes.planned(batch, type(planned)._remat_family.symbols)
            return planned
        why = why or failed
        if not (failed or too_large) or not sizes.follow_otherwise(batch):
            break
    if too_large is not None:
        sizes.follow_as_at_first(batch)
        raise too_large
    if why:
        sizes.cannot_vary(batch, why)
        warnings.warn(
            f"sizes of batches cannot vary within one plan, so that each has its own: {why}",
            stacklevel=9,
        )
    return None


def _within_guards(
    wanted: Wanted, batch: Any, make: Callable[..., RangedModule]
) -> tuple[RangedModule | None, str]:
    """A plan for the ranges that are wanted, or parts of them; else None, and why not.

    One that gives other bits than eager, as the check finds, is not wanted.
    """
    dynamic, why = wanted.dynamic, ""
    for _ in range(MOST_NARROWED):
        if dynamic is None:
            break
        try:
            return make(dynamic, as_far_as_fits=wanted.is_guess), ""
        except DifferenceError as error:
            # At any size the model asks for what it knows at one, and runs other ops for it.
            return None, str(error)
        except CaptureError as error:
            why = str(error)
            is_range = isinstance(error, RangeError)
            dynamic = _with_part(dynamic, error, batch) if is_range else None
    return None, why


def _with_part(dynamic: Dynamic, error: RangeError, batch: Any) -> Dynamic | None:
    """The ranges with that part of one in which a guard answers as it does for the batch."""
    size = _size_of(dynamic, error.symbol, batch)
    part = next(((low, high) for low, high in error.parts if low <= size <= high), None)
    if part is None or part[0] == part[1] or len(error.parts) > MOST_PARTS:
        return None
    narrowed: Any = copy.deepcopy(dict(dynamic))
    is_other = False
    for dims in narrowed.values():
        for dim, (name, low, high, multiple) in dims.items():
            if name == error.symbol:
                is_other |= (low, high) != part
                dims[dim] = (name, *part, multiple)
    return narrowed if is_other else None


def _size_of(dynamic: Dynamic, symbol: str, batch: Any) -> int:
    leaves, names = pytree.tree_leaves(batch), Signature(batch).names
    return next(
        leaves[names.index(str(leaf))].shape[dim]
        for leaf, dims in dynamic.items()
        for dim, entry in dims.items()
        if entry[0] == symbol
    )


def is_within(plan: nn.Module, other: nn.Module) -> bool:
    """Whether all sizes that one plan serves are served by another one."""
    if not isinstance(plan, RangedModule) or not isinstance(other, RangedModule):
        return False
    ranges = {one.name: one for one in type(other)._remat_family.symbols}
    return all(
        one.name in ranges and ranges[one.name].low <= one.low and one.high <= ranges[one.name].high
        for one in type(plan)._remat_family.symbols
    )
