"""A parameter that a model has under several names is one input of the trace.

AOTAutograd would make an input of each name, and autograd would add their gradients after backward.
Eager adds them as backward makes them. Two commute; the order of three changes the last bits of the
sum. So all names but the first are hidden during the trace. A guard of the rewritten module holds
that they are still tied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn

Slot = tuple[nn.Module, str]
"""A place that holds a parameter: the module, and the name in it."""


class _Shared(dict[str, Any]):
    """A module's parameters; those that another slot holds first are found, but not listed."""

    def __init__(self, own: dict[str, Any], elsewhere: dict[str, Slot]) -> None:
        super().__init__({name: held for name, held in own.items() if name not in elsewhere})
        self.elsewhere = elsewhere

    def __contains__(self, name: object) -> bool:
        return name in self.elsewhere or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        if name not in self.elsewhere:
            return super().__getitem__(name)
        module, first = self.elsewhere[name]
        return module._parameters[first]


@contextlib.contextmanager
def tied_as_one(model: nn.Module) -> Generator[None]:
    """List each parameter under its first name alone. Under the others it is still found."""
    before = [(module, module._parameters) for module in model.modules()]
    elsewhere: dict[nn.Module, dict[str, Slot]] = {}
    for (module, name), first in _later_slots(model).items():
        elsewhere.setdefault(module, {})[name] = first
    try:
        for module, slots in elsewhere.items():
            module.__dict__["_parameters"] = _Shared(module._parameters, slots)
        yield
    finally:
        for module, held in before:
            module.__dict__["_parameters"] = held


def _slots(model: nn.Module) -> list[Slot]:
    """Where each parameter is held, in the order of ``named_parameters``, shared ones each time."""
    return [
        (module, name)
        for _, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _later_slots(model: nn.Module) -> dict[Slot, Slot]:
    """Every slot of a parameter but its first, and that first one."""
    firsts: dict[int, Slot] = {}
    later: dict[Slot, Slot] = {}
    for slot in _slots(model):
        first = firsts.setdefault(id(slot[0]._parameters[slot[1]]), slot)
        if first != slot:
            later[slot] = first
    return later


def tied_places(model: nn.Module) -> dict[int, int]:
    """Places in ``named_parameters(remove_duplicate=False)`` that a trace leaves out.

    Each with the place of the parameter's first name.
    """
    slots = _slots(model)
    later = _later_slots(model)
    place = {slot: i for i, slot in reversed(list(enumerate(slots)))}
    return {i: place[later[slot]] for i, slot in enumerate(slots) if slot in later}
