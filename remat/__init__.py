"""The fastest PyTorch training step that fits a memory budget, exactly.

Importing this package imports nothing else of it; each name imports what it needs when first used.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

from remat.checkout import BESIDE, find_beside

find_beside()  # the other packages must be found before they are imported

if TYPE_CHECKING:
    from remat import cluster
    from remat.analysis.compare import sweep
    from remat.graph_capture.capture_api import capture
    from remat.graph_capture.costs.measuring import profile
    from remat.graph_capture.distributed.sharding import Sharding
    from remat.graph_capture.errors import (
        BudgetError,
        CaptureError,
        CheckError,
        PlanError,
        RematError,
        SolverError,
    )
    from remat.graph_capture.graph import TrainingStep as Step
    from remat.job.size_search import largest_batch
    from remat.one_call import rematerialize, solve
    from remat.plan import Plan
    from remat.plans_at_hand import load, plans
    from remat.rewriter.checking.check import check

__all__ = [
    "BudgetError",
    "CaptureError",
    "CheckError",
    "Plan",
    "PlanError",
    "RematError",
    "Sharding",
    "SolverError",
    "Step",
    "capture",
    "check",
    "cluster",
    "largest_batch",
    "load",
    "plans",
    "profile",
    "rematerialize",
    "solve",
    "sweep",
]

__version__ = "0.1.0"

_ERRORS = "remat.graph_capture.errors"
_HOMES = {  # where a name is defined, but for errors and wings
    "Plan": "remat.plan",
    "Sharding": "remat.graph_capture.distributed.sharding",
    "Step": "remat.graph_capture.graph:TrainingStep",
    "capture": "remat.graph_capture.capture_api",
    "check": "remat.rewriter.checking.check",
    "largest_batch": "remat.job.size_search",
    "load": "remat.plans_at_hand",
    "plans": "remat.plans_at_hand",
    "profile": "remat.graph_capture.costs.measuring",
    "rematerialize": "remat.one_call",
    "solve": "remat.one_call",
    "sweep": "remat.analysis.compare",
}


def _import_rich() -> None:
    state = random.getstate()
    importlib.import_module("rich.style")  # it draws a number of Python's, which is the user's
    random.setstate(state)


_import_rich()


def __getattr__(name: str) -> Any:
    if name in BESIDE or name == "cluster":
        return importlib.import_module(f"remat.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, inside = _HOMES.get(name, _ERRORS).partition(":")
    return getattr(importlib.import_module(module), inside or name)


def __dir__() -> list[str]:
    return sorted(__all__)
