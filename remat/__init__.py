"""The fastest PyTorch training step that fits a memory budget, exactly.

Importing this package imports nothing else of it; each name imports what it needs when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remat.checkout import BESIDE, find_beside

# The other packages must be found before they are imported.
find_beside()

if TYPE_CHECKING:
    from remat.analysis.budget_sweep import BudgetSlider, sweep
    from remat.analysis.compare import Comparison, compare
    from remat.analysis.explain import explain
    from remat.analysis.explanation import Explanation
    from remat.analysis.inspect import Inspection, inspect
    from remat.analysis.layer_checkpoints import EveryNth, every_n_layers
    from remat.analysis.memory_figures import predict_reserved
    from remat.analysis.plan_report import report
    from remat.blocks.block_planner import BlocksPlan
    from remat.blocks.rematerialized import block_plan
    from remat.caches.per_shape_plans import PlanCache, plans_of
    from remat.cluster.apply.cluster_mesh import cluster_mesh
    from remat.cluster.apply.parallelize import ClusterPart, parallelize
    from remat.compile.graph_context import CompiledPlan, compiled_plans
    from remat.graph_capture.capture_api import capture
    from remat.graph_capture.costs.cache import Profile
    from remat.graph_capture.costs.measuring import profile
    from remat.graph_capture.distributed.sharding import Sharding
    from remat.graph_capture.errors import RematError
    from remat.graph_capture.graph import TrainingGraph
    from remat.graph_capture.sizes.ranged_graph import RangedGraph
    from remat.job.fitted import Fit
    from remat.job.size_search import fit
    from remat.levers.delivery import use_arena
    from remat.one_call import rematerialize, solve
    from remat.placed import place
    from remat.ranges.curve import overheads_over
    from remat.rewriter.arena.arena import Arena
    from remat.rewriter.checking.check import Check, check
    from remat.rewriter.checking.measured_step import measured_step
    from remat.rewriter.checkpoint_policy import checkpoint_policy
    from remat.rewriter.graphs.updating import accumulating
    from remat.rewriter.plans.loading import load, plan_of, read_plan, save_plan
    from remat.rewriter.rewriting import rewrite
    from remat.schedules.family import Family, RangePeak, peak_over
    from remat.schedules.layout import Layout
    from remat.schedules.plan import Plan
    from remat.schedules.reserved import Reserved
    from remat.schedules.schedule import Schedule
    from remat.schedules.simulate import Simulation, simulate
    from remat.solver.budgets.front import Front
    from remat.solver.budgets.front import GibPrice as Price
    from remat.solver.budgets.sweep import least_peak, price_of_gib
    from remat.solver.result import Result

__all__ = [
    "Arena",
    "BlocksPlan",
    "BudgetSlider",
    "Check",
    "ClusterPart",
    "Comparison",
    "CompiledPlan",
    "EveryNth",
    "Explanation",
    "Family",
    "Fit",
    "Front",
    "Inspection",
    "Layout",
    "Plan",
    "PlanCache",
    "Price",
    "Profile",
    "RangePeak",
    "RangedGraph",
    "RematError",
    "Reserved",
    "Result",
    "Schedule",
    "Sharding",
    "Simulation",
    "TrainingGraph",
    "accumulating",
    "block_plan",
    "capture",
    "check",
    "checkpoint_policy",
    "cluster_mesh",
    "compare",
    "compiled_plans",
    "every_n_layers",
    "explain",
    "fit",
    "inspect",
    "least_peak",
    "load",
    "measured_step",
    "overheads_over",
    "parallelize",
    "peak_over",
    "place",
    "plan_of",
    "plans_of",
    "predict_reserved",
    "price_of_gib",
    "profile",
    "read_plan",
    "rematerialize",
    "report",
    "rewrite",
    "save_plan",
    "simulate",
    "solve",
    "sweep",
    "use_arena",
]

__version__ = "0.1.0"

_LAZY = {
    "Layout": "remat.schedules.layout",
    "Plan": "remat.schedules.plan",
    "RematError": "remat.graph_capture.errors",
    "Schedule": "remat.schedules.schedule",
    "Sharding": "remat.graph_capture.distributed.sharding",
    "Simulation": "remat.schedules.simulate",
    "simulate": "remat.schedules.simulate",
    "TrainingGraph": "remat.graph_capture.graph",
    "Arena": "remat.rewriter.arena.arena",
    "BlocksPlan": "remat.blocks.block_planner",
    "block_plan": "remat.blocks.rematerialized",
    "BudgetSlider": "remat.analysis.budget_sweep",
    "Check": "remat.rewriter.checking.check",
    "ClusterPart": "remat.cluster.apply.parallelize",
    "cluster_mesh": "remat.cluster.apply.cluster_mesh",
    "parallelize": "remat.cluster.apply.parallelize",
    "capture": "remat.graph_capture.capture_api",
    "check": "remat.rewriter.checking.check",
    "checkpoint_policy": "remat.rewriter.checkpoint_policy",
    "EveryNth": "remat.analysis.layer_checkpoints",
    "every_n_layers": "remat.analysis.layer_checkpoints",
    "Family": "remat.schedules.family",
    "Fit": "remat.job.fitted",
    "fit": "remat.job.size_search",
    "Front": "remat.solver.budgets.front",
    "Comparison": "remat.analysis.compare",
    "compare": "remat.analysis.compare",
    "Explanation": "remat.analysis.explanation",
    "explain": "remat.analysis.explain",
    "Inspection": "remat.analysis.inspect",
    "inspect": "remat.analysis.inspect",
    "CompiledPlan": "remat.compile.graph_context",
    "compiled_plans": "remat.compile.graph_context",
    "least_peak": "remat.solver.budgets.sweep",
    "load": "remat.ranks.same_order:agreed_load",
    "measured_step": "remat.rewriter.checking.measured_step",
    "overheads_over": "remat.ranges.curve",
    "peak_over": "remat.schedules.family",
    "place": "remat.placed",
    "RangePeak": "remat.schedules.family",
    "RangedGraph": "remat.graph_capture.sizes.ranged_graph",
    "plan_of": "remat.rewriter.plans.loading",
    "Price": "remat.solver.budgets.front:GibPrice",
    "Profile": "remat.graph_capture.costs.cache",
    "PlanCache": "remat.caches.per_shape_plans",
    "plans_of": "remat.caches.per_shape_plans",
    "predict_reserved": "remat.analysis.memory_figures",
    "price_of_gib": "remat.solver.budgets.sweep",
    "profile": "remat.graph_capture.costs.measuring",
    "read_plan": "remat.rewriter.plans.loading",
    "rematerialize": "remat.one_call",
    "report": "remat.analysis.plan_report",
    "Reserved": "remat.schedules.reserved",
    "Result": "remat.solver.result",
    "rewrite": "remat.ranks.same_order:agreed_rewrite",
    "save_plan": "remat.rewriter.plans.loading",
    "solve": "remat.one_call",
    "sweep": "remat.analysis.budget_sweep",
    "accumulating": "remat.rewriter.graphs.updating",
    "use_arena": "remat.levers.delivery",
}


def __getattr__(name: str) -> Any:
    if name in BESIDE:
        return importlib.import_module(f"remat.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, inside = _LAZY[name].partition(":")
    return getattr(importlib.import_module(module), inside or name)


def __dir__() -> list[str]:
    return sorted(__all__)
