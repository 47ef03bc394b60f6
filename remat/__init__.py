"""The fastest PyTorch training step that fits a memory budget, exactly.

Importing this package imports no torch; what needs torch imports it when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remat.graph_capture.errors import RematError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.api import rematerialize, solve
    from remat.graph_capture.tracing import capture
    from remat.rewriter.checking import Check, check
    from remat.rewriter.rewriting import rewrite

__all__ = [
    "Check",
    "RematError",
    "Result",
    "Schedule",
    "Simulation",
    "TrainingGraph",
    "capture",
    "check",
    "rematerialize",
    "rewrite",
    "simulate",
    "solve",
]

__version__ = "0.1.0"

_LAZY = {
    "Check": "remat.rewriter.checking",
    "capture": "remat.graph_capture.tracing",
    "check": "remat.rewriter.checking",
    "rematerialize": "remat.api",
    "rewrite": "remat.rewriter.rewriting",
    "solve": "remat.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
