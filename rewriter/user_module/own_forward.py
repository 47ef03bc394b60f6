"""The forward of a module that shares the user's ``__dict__``, as trainers see and replace it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from remat.graph_capture.python_state.module_hooks import ALL_HOOKS
from remat.graph_capture.tracing.step_module import LossFunction
from remat.rewriter.user_module.unplanned import Unplanned

_Forward = Callable[..., Any]
_TAKEN_BY = ("__getitem__", "__iter__")
"""Methods of a container, such as `nn.Sequential`, that hand out its parts."""


class _OwnForward:
    """A descriptor, which Python finds before the instance's ``__dict__``, the user's too."""

    def __init__(self, function: _Forward) -> None:
        self.function = function
        self.replacement: _Forward | None = None

    def __get__(self, instance: Any, owner: type) -> _Forward:
        if instance is None:
            return self.function
        # A `model.forward = ...` that the user has set before does not hide the plan.
        return self.replacement or MethodType(self.function, instance)

    def __set__(self, instance: Any, replacement: _Forward) -> None:
        if getattr(replacement, "__func__", None) is self.function:  # ours again
            self.replacement = None
            return
        # Kept here, not on the user's module, where it and ours would call each other without end,
        # as with Accelerate's forward for mixed precision.
        self.replacement = replacement
        type(instance)._remat_unplanned.replaced(instance, replacement)

    def __delete__(self, instance: Any) -> None:
        self.replacement = None


def replacement_of(module: nn.Module) -> Any:
    """What has taken the place of a planned module's forward, on it or on its class, or None."""
    found = inspect.getattr_static(type(module), "forward")
    return found.replacement if isinstance(found, _OwnForward) else found


def class_of_user(
    base: type[nn.Module], model: nn.Module, loss_fn: LossFunction | None, **own: Any
) -> Any:
    """A subclass of `base` and of the model's class, with the model's class name and signature."""
    user = type(model)
    # Trainers read the class name to choose how the loss is shifted, and keep it in checkpoints.
    names = {"__module__": user.__module__, "__qualname__": user.__qualname__}
    # Trainers read the signature to choose columns of a data set. torch.compile leaves this forward
    # alone: it would break at every rewritten step.
    forward = _OwnForward(torch.compiler.disable(_like_users(user, base.forward, loss_fn)))
    ours = {
        "forward": forward,
        "_remat_unplanned": Unplanned(),
        # What `model.compile()` leaves in the shared `__dict__` would run unplanned.
        "_compiled_call_impl": property(lambda _: None, lambda _, compiled: None),
    }
    body = {"__doc__": base.__doc__, **names, **ours, **own}
    body |= {name: _noting(user, name) for name in _TAKEN_BY if hasattr(user, name)}
    body |= {
        name: _OfUser(name, user) for name in _names_of_user(model) if _is_ours(base, body, name)
    }
    # Not by calling the metaclass: a registry of the user's would take this class for one of his.
    return type.__new__(type(user), user.__name__, (_Unannounced, base, user), body)


def _noting(user: type[nn.Module], name: str) -> _Forward:
    def method(self: Any, *args: Any) -> Any:
        self._remat_note("a part")
        return getattr(user, name)(self, *args)

    return functools.wraps(getattr(user, name))(method)


class _OfUser:
    """A name of both the user's module and a planned one: the user's; `plan_of` finds ours."""

    def __init__(self, name: str, user: type[nn.Module]) -> None:
        self.name = name
        self.of_class = inspect.getattr_static(user, name, None)

    def __get__(self, instance: Any, owner: type) -> Any:
        tables = () if instance is None else _tables(instance)
        for table in tables:
            if self.name in table:
                return table[self.name]
        if hasattr(self.of_class, "__get__"):
            return self.of_class.__get__(instance, owner)
        return self.of_class

    def __set__(self, instance: Any, value: Any) -> None:
        if hasattr(self.of_class, "__set__"):
            self.of_class.__set__(instance, value)
        else:
            vars(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self.name]


def _tables(instance: Any) -> tuple[dict[str, Any], ...]:
    state = vars(instance)
    return state, state["_parameters"], state["_buffers"], state["_modules"]


def _names_of_user(model: nn.Module) -> set[str]:
    # Not the names that every module has.
    kinds = [kind for kind in type(model).__mro__ if not issubclass(nn.Module, kind)]
    named = {name for kind in kinds for name in vars(kind)}.union(*_tables(model))
    of_all = {*vars(nn.Module()), "_compiled_call_impl"}  # the latter is there once it is set
    return {name for name in named if not name.startswith("__")} - of_all


def _is_ours(base: type[nn.Module], body: dict[str, Any], name: str) -> bool:
    """Whether a planned module has something of ours under that name; `forward` stays ours."""
    if name == "forward":
        return False
    ours, every = getattr(base, name, None), getattr(nn.Module, name, None)
    return name in body or (ours is not None and ours is not every)


class _Unannounced:
    """Keeps a class that is made of it from the user's ``__init_subclass__``."""

    def __init_subclass__(cls, **_: Any) -> None: ...


def _like_users(user: type[nn.Module], forward: _Forward, loss_fn: LossFunction | None) -> _Forward:
    @functools.wraps(user.forward)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    found = inspect.signature(user.forward)
    given = list(found.parameters.values())
    if loss_fn is not None and "target" not in found.parameters:
        target = inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY, default=None)
        place = sum(one.kind is not inspect.Parameter.VAR_KEYWORD for one in given)
        # Keyword-only, so before **kwargs.
        given.insert(place, target)
    vars(method)["__signature__"] = found.replace(parameters=given)
    return method


_originals: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


def with_replaced(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """`model` with other modules in the places of some; the user's model stays as it is.

    A module that holds a replaced one is copied, one deep. The copy has the same parameters,
    buffers and attributes, but its own submodules and hooks. All else is shared.
    """
    made = _rebuilt(model, dict(replaced))
    if made is not model:
        _originals[made] = model
    return made


def original_of_shell(model: nn.Module) -> nn.Module:
    return _originals.get(model, model)


def _rebuilt(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    # A module that stands in several places stays one module.
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
    # Not by calling the class, whose __init__ makes parameters of its own.
    shell = object.__new__(type(module))
    shell.__dict__ = dict(module.__dict__)
    for name in ALL_HOOKS:
        shell.__dict__[name] = module.__dict__[name].copy()
    shell.__dict__["_modules"] = children
    return shell
