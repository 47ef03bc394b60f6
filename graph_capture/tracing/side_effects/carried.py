"""What forward writes on modules: tensors that each step sets again, or a refusal.

A mixture of experts keeps its auxiliary loss on an attribute, attention its weights. Such tensors
are results of the step beside its output, and are set after each step as eager sets them. A number
that forward reads and changes, as a counter, would need another graph at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.joint.nodes import storage_key
from remat.graph_capture.python_state.hidden import Hidden
from remat.graph_capture.python_state.module_hooks import (
    ModuleHooks,
)
from remat.graph_capture.python_state.places import Entry, Place, is_same
from remat.graph_capture.python_state.watch import PythonState


@dataclass(frozen=True)
class Carried:
    """An attribute that each step sets: a tree of tensors and constants.

    Attributes
    ----------
    path, name : of the module, and of its attribute. leaves : of the tree; None for each tensor.
    is_read : whether forward reads the attribute too, so that it keeps something for later.
    before : storages of the tensors that it held until now.
    """

    path: str
    name: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    tensors: int
    is_read: bool
    before: frozenset[int] = frozenset()

    @property
    def text(self) -> str:
        """Its path in the model."""
        return f"{self.path}.{self.name}".lstrip(".")

    def put(self, module: nn.Module, tensors: list[Tensor]) -> None:
        """Set it on its module, with the tensors of a step."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor else leaf for is_tensor, leaf in self.leaves]
        setattr(module, self.name, pytree.tree_unflatten(leaves, self.spec))


@dataclass(frozen=True)
class Settled:
    """A place that forward finds empty at its first call, and then leaves at a plain value.

    Attributes
    ----------
    place : with what was there. value : what each step leaves there, as eager does.
    """

    place: Place | Hidden
    value: Any

    def put(self) -> None:
        """Set it."""
        self.place.put(self.value)

    def is_first(self, now: Any) -> bool:
        """Whether the place is as it was before the first call."""
        return is_same(now, self.place.value)

    def is_left(self, now: Any) -> bool:
        """Whether the place is as each step leaves it."""
        return is_same(now, self.value)


def out_of_step(settled: Iterable[Settled]) -> tuple[Settled, Any] | None:
    """The first place that is neither as before the first call nor as after it, and its value.

    Hooks are to be as after it unless everything is as before: forward sets them only once.
    """
    found = [(one, one.place.now()) for one in settled]
    if all(one.is_first(now) for one, now in found):
        return None
    for one, now in found:
        may_be_first = not isinstance(one.place, ModuleHooks)
        if not one.is_left(now) and not (may_be_first and one.is_first(now)):
            return one, now
    return None


def short(value: Any) -> str:
    """A value in a few words, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def state_guarded(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    carried: Iterable[Carried],
    traced: PythonState,
) -> PythonState:
    """Python's state as it is now, without what each step sets.

    Parameters
    ----------
    traced : the state of a model of the same step, as it was traced.
    """
    state = PythonState(model, loss_fn, traced.ran_alone)
    state.compare_as(traced)
    state.asks_identity = traced.asks_identity
    state.leave_out(places_of(model, carried))
    state.compare_items_of(replace(place, value=place.now()) for place in traced.grown)
    return state


def places_of(model: nn.Module, carried: Iterable[Carried]) -> list[Entry]:
    """Where these attributes are in a model."""
    held = [(vars(model.get_submodule(one.path)), one) for one in carried]
    return [Entry(one.text, space, one.name, space.get(one.name)) for space, one in held]


def storages_in(leaves: Iterable[Any]) -> frozenset[int]:
    """The storages of the tensors among these; a sparse tensor counts as its own."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return frozenset(storage_key(t) if t.layout is torch.strided else id(t) for t in tensors)
