"""Results that depend on a graph alone, kept beside it, so that many solves share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from remat.graph_capture.graph import TrainingGraph

T = TypeVar("T")
PREFIX = "remat.solver."


def kept_with(graph: TrainingGraph, name: str, make: Callable[[], T]) -> T:
    """What `make` returned when first asked under `name`; it ends with the graph object.

    Neither files nor copies nor other processes see it.
    """
    known = vars(graph)
    key = PREFIX + name
    if key not in known:
        known[key] = make()
    return cast("T", known[key])
