"""A file without a factory, in which a model and its batch are variables."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

MODEL, BATCH = "model", "batch"
OTHERS = ("loss_fn", "target")


def factory_of(module: ModuleType) -> Callable[[], dict[str, Any]] | None:
    """A factory of the variables `model` and `batch` of a module; None if it lacks one of them.

    A batch that is a dict is given to forward by keywords, a tuple or list by position, and
    anything else as the one argument. `loss_fn` and `target` are taken where the module has them.
    """
    from torch import nn

    if not isinstance(getattr(module, MODEL, None), nn.Module) or not hasattr(module, BATCH):
        return None

    def factory() -> dict[str, Any]:
        batch = getattr(module, BATCH)
        parts = {name: getattr(module, name) for name in OTHERS if hasattr(module, name)}
        if isinstance(batch, dict):
            return {"model": module.model, "kwargs": batch, **parts}
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        return {"model": module.model, "args": args, **parts}

    return factory
