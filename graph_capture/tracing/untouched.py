"""Tracing runs the user's forward. This restores the module and the random streams after it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def untouched(model: nn.Module, *, warn: bool = True) -> Generator[None]:
    """Restore every submodule's attributes and all RNG streams on leaving.

    Attributes that forward itself changes are restored too. A warning names them, since the
    rewritten module has no such side effects.
    """
    before = [(name, module, _snapshot(module)) for name, module in model.named_modules()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            changed = [
                f"{name}.{attribute}".lstrip(".")
                for name, module, attributes in before
                for attribute in _restore(module, attributes)
            ]
    if changed and warn:
        warnings.warn(
            f"forward changes {', '.join(changed)}: plain attributes stay as they are in the "
            "rewritten module. Register a buffer where the value matters",
            stacklevel=4,
        )


def _snapshot(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute, with a shallow copy of it where it is a plain container."""
    return {name: (value, _copy_of_container(value)) for name, value in vars(module).items()}


def _copy_of_container(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else None  # pyright: ignore


def _restore(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> list[str]:
    """Put attributes back; return the names of the plain ones that had changed."""
    now = vars(module)
    changed = [name for name in now if name not in attributes]
    for name in changed:
        del now[name]
    for name, (value, copied) in attributes.items():
        if name not in now or now[name] is not value:
            changed.append(name)
            now[name] = value
        if copied is not None and not _same_items(value, copied):
            if not name.startswith("_"):
                changed.append(name)
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(copied)
    return changed


def _same_items(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in before and before[key] is item for key, item in now.items())  # pyright: ignore
    if isinstance(now, list):
        return all(a is b for a, b in zip(now, before, strict=True))  # pyright: ignore
    return now == before
