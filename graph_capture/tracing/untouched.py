"""Tracing runs the user's forward. This restores the modules and the random streams after it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from remat.graph_capture.python_state.places import MISSING, Entry, copied, holds, refill

Attributes = dict[str, tuple[Any, Any]]
"""Values by name, each with a shallow copy of it where it is a plain container."""


@dataclass(frozen=True)
class Written:
    """An attribute of a module that forward has set, changed in place or removed.

    Attributes
    ----------
    before : the object that was there. held : that, or a copy from then where it is a container.
    """

    path: str
    module: nn.Module
    name: str
    before: Any
    held: Any

    @property
    def text(self) -> str:
        """Its path in the model."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def place(self) -> Entry:
        """Where it is."""
        return Entry(self.text, vars(self.module), self.name, self.before)

    @property
    def value(self) -> Any:
        """What it holds now; None where it was removed."""
        return vars(self.module).get(self.name)


class ModuleAttributes:
    """Every attribute of every module as it is when this is made, one container deep.

    Parameters
    ----------
    but : names to leave alone.
    """

    def __init__(self, model: nn.Module, but: frozenset[str] = frozenset()) -> None:
        self._before = [(path, m, _snapshot(m, but)) for path, m in model.named_modules()]
        self._but = but

    def written(self) -> list[Written]:
        """Plain attributes that are not as they were; not those of torch, such as hooks."""
        return [
            Written(path, module, name, *_before(module, name, attributes))
            for path, module, attributes in self._before
            for name in _changed(vars(module), attributes, self._but)
            if name not in OF_TORCH and not _is_torchs_own(module, name)
        ]

    def restore(self) -> None:
        """Put all of them back."""
        for _, module, attributes in self._before:
            _restore(vars(module), attributes, self._but)


OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has: its tables of parameters, of hooks and of other modules, and its mode."""


def _is_torchs_own(module: nn.Module, name: str) -> bool:
    """Whether it is what a module of torch keeps for itself, as an LSTM its flat weights."""
    return name.startswith("_") and type(module).__module__.startswith("torch.")


def _before(module: nn.Module, name: str, attributes: Attributes) -> tuple[Any, Any]:
    """What the instance held, or else its class; and a copy of it where it is a container."""
    if name not in attributes:
        return (getattr(type(module), name, MISSING),) * 2
    value, kept = attributes[name]
    return value, value if kept is None else kept


@contextlib.contextmanager
def untouched(model: nn.Module) -> Generator[ModuleAttributes]:
    """Restore every submodule's attributes and all random streams on leaving.

    Gradients are recorded meanwhile, also where the caller is under ``torch.no_grad()`` or in
    ``torch.inference_mode()``, as a block that sets up a model often is.
    """
    attributes = ModuleAttributes(model)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    # Leaving inference mode also switches gradients on.
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices):
        try:
            yield attributes
        finally:
            attributes.restore()
            random.setstate(python)
            np.random.set_state(numpy)


def _snapshot(module: nn.Module, but: frozenset[str]) -> Attributes:
    """Each attribute, with a shallow copy of it where it is a plain container."""
    held = ((name, value) for name, value in vars(module).items() if name not in but)
    return {name: (value, _copy_of_container(value)) for name, value in held}


def _copy_of_container(value: Any) -> Any:
    return copied(value) if isinstance(value, (dict, list, set)) else None


def _changed(now: dict[str, Any], attributes: Attributes, but: frozenset[str]) -> Iterator[str]:
    yield from (name for name in now if name not in attributes and name not in but)
    for name, (value, kept) in attributes.items():
        is_another = name not in now or now[name] is not value
        if is_another or (kept is not None and not holds(value, kept)):
            yield name


def _restore(now: dict[str, Any], attributes: Attributes, but: frozenset[str]) -> None:
    for name in list(_changed(now, attributes, but)):
        if name not in attributes:
            del now[name]
            continue
        now[name], kept = attributes[name]
        if kept is not None:
            refill(now[name], kept)
