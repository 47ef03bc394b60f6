"""From a schedule back to a module that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.rewriter.checking import Check, check
    from remat.rewriter.module import RematModule
    from remat.rewriter.rewriting import rewrite

__all__ = ["Check", "RematModule", "check", "rewrite"]

_LAZY = {"Check": "checking", "check": "checking", "RematModule": "module", "rewrite": "rewriting"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
