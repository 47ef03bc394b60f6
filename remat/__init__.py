"""The fastest PyTorch training step that fits a memory budget, exactly.

Importing this package imports no torch; what needs torch imports it when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remat.graph_capture.errors import RematError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sharding import Sharding
from remat.schedules.plan import Plan
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate

if TYPE_CHECKING:
    from remat.api import rematerialize, solve
    from remat.block_planning import BlocksPlan
    from remat.blocks import block_plan, rematerialize_blocks
    from remat.budget_slider import BudgetSlider
    from remat.comparing import Comparison, compare
    from remat.compile_report import CompiledPlan, compiled_plans
    from remat.explaining import Explanation, explain
    from remat.fitted import Fit
    from remat.fitting import fit
    from remat.fronts import sweep
    from remat.graph_capture.profile_file import Profile
    from remat.graph_capture.profiling import profile
    from remat.graph_capture.tracing import capture
    from remat.inspecting import Inspection, inspect
    from remat.layer_checkpoints import EveryNth, every_n_layers
    from remat.report_page import report
    from remat.rewriter.checking import Check, check
    from remat.rewriter.loading import load, plan_of
    from remat.rewriter.measured_step import measured_step
    from remat.rewriter.plan_archive import read_plan, save_plan
    from remat.rewriter.rewriting import rewrite
    from remat.several_shapes import PlanCache, plan_cache, plans_of
    from remat.solver.front import Front, Price
    from remat.solver.memory_price import least_peak, price_of_gib
    from remat.solver.result import Result

__all__ = [
    "BlocksPlan",
    "BudgetSlider",
    "Check",
    "Comparison",
    "CompiledPlan",
    "EveryNth",
    "Explanation",
    "Fit",
    "Front",
    "Inspection",
    "Plan",
    "PlanCache",
    "Price",
    "Profile",
    "RematError",
    "Result",
    "Schedule",
    "Sharding",
    "Simulation",
    "TrainingGraph",
    "block_plan",
    "capture",
    "check",
    "compare",
    "compiled_plans",
    "every_n_layers",
    "explain",
    "fit",
    "inspect",
    "least_peak",
    "load",
    "measured_step",
    "plan_cache",
    "plan_of",
    "plans_of",
    "price_of_gib",
    "profile",
    "read_plan",
    "rematerialize",
    "rematerialize_blocks",
    "report",
    "rewrite",
    "save_plan",
    "simulate",
    "solve",
    "sweep",
]

__version__ = "0.1.0"

_LAZY = {
    "BlocksPlan": "remat.block_planning",
    "block_plan": "remat.blocks",
    "rematerialize_blocks": "remat.blocks",
    "BudgetSlider": "remat.budget_slider",
    "Check": "remat.rewriter.checking",
    "capture": "remat.graph_capture.tracing",
    "check": "remat.rewriter.checking",
    "EveryNth": "remat.layer_checkpoints",
    "every_n_layers": "remat.layer_checkpoints",
    "Fit": "remat.fitted",
    "fit": "remat.fitting",
    "Front": "remat.solver.front",
    "Comparison": "remat.comparing",
    "compare": "remat.comparing",
    "Explanation": "remat.explaining",
    "explain": "remat.explaining",
    "Inspection": "remat.inspecting",
    "inspect": "remat.inspecting",
    "CompiledPlan": "remat.compile_report",
    "compiled_plans": "remat.compile_report",
    "least_peak": "remat.solver.memory_price",
    "load": "remat.rewriter.loading",
    "measured_step": "remat.rewriter.measured_step",
    "plan_of": "remat.rewriter.loading",
    "Price": "remat.solver.front",
    "Profile": "remat.graph_capture.profile_file",
    "PlanCache": "remat.several_shapes",
    "plan_cache": "remat.several_shapes",
    "plans_of": "remat.several_shapes",
    "price_of_gib": "remat.solver.memory_price",
    "profile": "remat.graph_capture.profiling",
    "read_plan": "remat.rewriter.plan_archive",
    "rematerialize": "remat.api",
    "report": "remat.report_page",
    "Result": "remat.solver.result",
    "rewrite": "remat.rewriter.rewriting",
    "save_plan": "remat.rewriter.plan_archive",
    "solve": "remat.api",
    "sweep": "remat.fronts",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
