"""From a module and a batch to a `TrainingGraph`. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value

if TYPE_CHECKING:
    from remat.graph_capture.capture_api import capture
    from remat.graph_capture.costs.op_costs import measure_costs
    from remat.graph_capture.tracing.trace import trace
    from remat.graph_capture.tracing.traced_step import Trace

__all__ = ["Op", "Resident", "Trace", "TrainingGraph", "Value", "capture", "measure_costs", "trace"]

_LAZY = {
    "measure_costs": "costs.op_costs",
    "capture": "capture_api",
    "trace": "tracing.trace",
    "Trace": "tracing.traced_step",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
