"""From a schedule back to a module that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.graph_capture.torch_private.core import require_tested_release

if TYPE_CHECKING:
    from remat.rewriter.checking.check import Check, check
    from remat.rewriter.plans.loading import load, plan_of, read_plan, save_plan
    from remat.rewriter.rewriting import rewrite
    from remat.rewriter.user_module.module import RematModule

__all__ = ["Check", "RematModule", "check", "load", "plan_of", "read_plan", "rewrite", "save_plan"]

_LAZY = {
    "Check": "checking.check",
    "check": "checking.check",
    "load": "plans.loading",
    "plan_of": "plans.loading",
    "read_plan": "plans.loading",
    "RematModule": "user_module.module",
    "rewrite": "rewriting",
    "save_plan": "plans.loading",
}


require_tested_release()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
