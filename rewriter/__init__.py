"""From a schedule back to a module that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.rewriter.checking import Check, check
    from remat.rewriter.loading import load, plan_of
    from remat.rewriter.module import RematModule
    from remat.rewriter.plan_archive import read_plan, save_plan
    from remat.rewriter.rewriting import rewrite

__all__ = [
    "Check",
    "RematModule",
    "check",
    "load",
    "plan_of",
    "read_plan",
    "rewrite",
    "save_plan",
]

_LAZY = {
    "Check": "checking",
    "check": "checking",
    "load": "loading",
    "plan_of": "loading",
    "read_plan": "plan_archive",
    "RematModule": "module",
    "rewrite": "rewriting",
    "save_plan": "plan_archive",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
