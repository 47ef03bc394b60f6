"""What holds of the points at which a range was measured, also of those in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from remat.graph_capture.errors import GraphError
from remat.graph_capture.graph_rules import MOST_BYTES, are_figures
from remat.graph_capture.shapes.price_points import PricePoint
from remat.graph_capture.shapes.ranges import Symbol, corner
from remat.graph_capture.shapes.workspaces import WorkspacePoint, is_within


def check_points(
    n_ops: int,
    symbols: Sequence[Symbol],
    points: Sequence[PricePoint],
    workspaces: Sequence[WorkspacePoint],
) -> None:
    """Raise `GraphError` unless each has a figure for each op, and the last price is at the top."""
    for one in (*points, *workspaces):
        if set(one.sizes) != {symbol.name for symbol in symbols}:
            raise GraphError(f"a range was measured at {one.sizes}, which are not its sizes")
        _require_figures(n_ops, one.sizes, one.workspace_bytes, MOST_BYTES)
    for point in points:
        _require_figures(n_ops, point.sizes, point.cost_us, math.inf)
        _require_figures(n_ops, point.sizes, point.flops, math.inf)
        _require_figures(n_ops, point.sizes, [0] * len(point.origins), math.inf)
        # Extra bytes may be less than none: a GPU's random state is smaller than the CPU's.
        kept = (*point.extra_bytes.values(), point.libraries_bytes)
        if point.libraries_bytes < 0 or not all(abs(one) < MOST_BYTES for one in kept):
            raise GraphError(f"bytes at {point.sizes} are negative, or too many")
    if points and not is_within(corner(symbols, "high"), points[-1].sizes):
        raise GraphError(f"a range was priced up to {points[-1].sizes}, and goes further")


def _require_figures(
    n_ops: int, sizes: dict[str, int], figures: Sequence[float], most: float
) -> None:
    if len(figures) != n_ops:
        raise GraphError(f"at {sizes} there are figures of {len(figures)} ops, not of {n_ops}")
    if not are_figures(*figures) or any(one >= most for one in figures):
        raise GraphError(f"a figure at {sizes} is negative, or too large")
