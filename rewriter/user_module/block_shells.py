"""A model with some of its submodules replaced; the user's model stays as it is."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from remat.graph_capture.python_state.module_hooks import ALL_HOOKS

_originals: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


def with_replaced(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """`model` with other modules in the places of some.

    A module that holds a replaced one is copied, one deep. The copy has the same parameters,
    buffers and attributes, but its own submodules and hooks, so the user's keep theirs. All else
    is shared.
    """
    made = _rebuilt(model, dict(replaced))
    if made is not model:
        _originals[made] = model
    return made


def original_of_shell(model: nn.Module) -> nn.Module:
    """The model that `with_replaced` was given, where it made this one; else this one."""
    return _originals.get(model, model)


def _rebuilt(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in known:
        return known[module]
    children = {
        name: child if child is None else _rebuilt(child, known)
        for name, child in module._modules.items()
    }
    is_same = all(child is module._modules[name] for name, child in children.items())
    known[module] = module if is_same else shell_with(module, children)
    return known[module]


def shell_with(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """A copy of `module`, one deep, with other submodules and hooks of its own."""
    shell = object.__new__(type(module))
    shell.__dict__ = dict(module.__dict__)
    for name in ALL_HOOKS:
        shell.__dict__[name] = module.__dict__[name].copy()
    shell.__dict__["_modules"] = children
    return shell
