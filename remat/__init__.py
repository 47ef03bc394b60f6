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
from remat.solver.front import Front, Price
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.api import rematerialize, solve
    from remat.compile_report import CompiledPlan, compiled_plans
    from remat.fronts import sweep
    from remat.graph_capture.profile_file import Profile
    from remat.graph_capture.profiling import profile
    from remat.graph_capture.tracing import capture
    from remat.rewriter.checking import Check, check
    from remat.rewriter.rewriting import rewrite
    from remat.several_shapes import PlanCache, plan_cache, plans_of
    from remat.solver.memory_price import least_peak, price_of_gib

__all__ = [
    "Check",
    "CompiledPlan",
    "Front",
    "PlanCache",
    "Price",
    "Profile",
    "RematError",
    "Result",
    "Schedule",
    "Simulation",
    "TrainingGraph",
    "capture",
    "check",
    "compiled_plans",
    "least_peak",
    "plan_cache",
    "plans_of",
    "price_of_gib",
    "profile",
    "rematerialize",
    "rewrite",
    "simulate",
    "solve",
    "sweep",
]

__version__ = "0.1.0"

_LAZY = {
    "Check": "remat.rewriter.checking",
    "capture": "remat.graph_capture.tracing",
    "check": "remat.rewriter.checking",
    "CompiledPlan": "remat.compile_report",
    "compiled_plans": "remat.compile_report",
    "least_peak": "remat.solver.memory_price",
    "Profile": "remat.graph_capture.profile_file",
    "PlanCache": "remat.several_shapes",
    "plan_cache": "remat.several_shapes",
    "plans_of": "remat.several_shapes",
    "price_of_gib": "remat.solver.memory_price",
    "profile": "remat.graph_capture.profiling",
    "rematerialize": "remat.api",
    "rewrite": "remat.rewriter.rewriting",
    "solve": "remat.api",
    "sweep": "remat.fronts",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
