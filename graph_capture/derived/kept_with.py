"""What was found out about a graph, kept with the object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from remat.graph_capture.graph import TrainingGraph

T = TypeVar("T")
PREFIX = "remat kept: "


def kept_with(graph: TrainingGraph, name: str, make: Callable[[], T]) -> T:
    """What `make` returned when it was first asked under `name` for this graph object.

    It is kept as long as the object. Files, copies and other processes do not see it.
    """
    known = vars(graph)
    key = PREFIX + name
    if key not in known:
        known[key] = make()
    return cast("T", known[key])
