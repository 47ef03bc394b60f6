"""From a module and a batch to a `TrainingGraph`. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value

if TYPE_CHECKING:
    from remat.graph_capture.capturing import capture
    from remat.graph_capture.prices.pricing import price
    from remat.graph_capture.tracing.trace import Trace, trace

__all__ = ["Op", "Resident", "Trace", "TrainingGraph", "Value", "capture", "price", "trace"]

_LAZY = {
    "price": "prices.pricing",
    "capture": "capturing",
    "trace": "tracing.trace",
    "Trace": "tracing.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
