"""Gives values to what a rank has of a model on the meta device.

A model that no host holds is built on the meta device. Each rank then has storage and values for
the modules of its own stages alone, from a function of the user's: what he would call on the whole
model, had he the room. What comes before the blocks is there on all ranks for a moment, since it
says what blocks are called with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.errors import PlanError
from remat.graph_capture.tracing.without_storage import has_storage

Materialize = Callable[[str, nn.Module], object]
"""Gives a module, at a path of the model, storage and values."""


def materialize_modules(modules: Mapping[str, nn.Module], materialize: Materialize | None) -> None:
    """Call `materialize` for each module, given by path, that has no storage.

    Tied parameters stay tied: the first module that has one gives it its values.

    Raises
    ------
    PlanError : something has no storage afterwards; or it is of another shape, dtype, or number.
    """
    tied = _Tied(modules.values())
    for path, module in modules.items():
        if has_storage(module):
            continue
        before = _facts(module)
        if materialize is not None:
            materialize(path, module)
        _refuse_other(path, before, module)
    tied.again()


def values_digest(modules: Mapping[str, nn.Module]) -> str:
    """Of names, shapes, and the first numbers of each parameter and buffer that holds any."""
    found = hashlib.sha256()
    for path, module in modules.items():
        for name, tensor in _state(module):
            some = [] if tensor.is_meta else _first_numbers(tensor.detach())
            found.update(f"{path} {name} {tuple(tensor.shape)} {tensor.dtype} {some}".encode())
    return found.hexdigest()


def _first_numbers(tensor: Tensor) -> list[float]:
    some = tensor.flatten()[:4]
    return (torch.view_as_real(some) if some.is_complex() else some).double().flatten().tolist()


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


class _Tied:
    """Parameters and buffers that several modules have in common."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for held, name, tensor in _state_places(modules):
            places.setdefault(id(tensor), []).append((held, name))
        self._groups = [group for group in places.values() if len(group) > 1]

    def again(self) -> None:
        """Put what the first of them holds into the others."""
        for (held, name), *others in self._groups:
            for other, other_name in others:
                other[other_name] = held[name]


def _state_places(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    inside = dict.fromkeys(one for module in modules for one in module.modules())
    for module in inside:
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield held, name, tensor


def _facts(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in _state(module)}


def _refuse_other(path: str, before: dict[str, tuple[Any, ...]], module: nn.Module) -> None:
    if not has_storage(module):
        name = next(name for name, tensor in _state(module) if tensor.is_meta)
        raise PlanError(
            f"materialize has left {path}.{name} without storage: call module.to_empty(device=...) "
            "in it, and then give each parameter and buffer its values"
        )
    after = _facts(module)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise PlanError(
                f"materialize has made {path}.{name} {_facts_text(after.get(name))}, and it was "
                f"{_facts_text(before.get(name))}: give it other values alone"
            )


def _facts_text(facts: tuple[Any, ...] | None) -> str:
    if facts is None:
        return "missing"
    shape, dtype, trains = facts
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if trains else ', frozen'}"
