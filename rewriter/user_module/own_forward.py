"""The forward of a planned module, as trainers see and replace it; and who trains without it.

Training without the plan is said once, with its cause: eval mode, a replaced forward, Lightning's
`training_step`, or a module taken apart. Parameters are watched only after one of these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.python_state.module_hooks import ALL_HOOKS
from remat.graph_capture.torch_private.core import queue_callback
from remat.graph_capture.tracing.outputs import leaves_in
from remat.graph_capture.tracing.step_module import LossFunction
from remat.rewriter.checking.audit import audits_paused
from remat.rewriter.guards.backward import OnlyLooks, is_of_a_plan

_TORCH = str(Path(torch.__file__).parent)
_NOT_THE_PLAN = "so its parameters received gradients without its plan"


class _Arrived(OnlyLooks):
    """The hook on a parameter. It does not keep alive whom it tells."""

    def __init__(self, unplanned: Unplanned) -> None:
        self._told = weakref.ref(unplanned)

    def __call__(self, parameter: Tensor) -> None:
        if (unplanned := self._told()) is not None:
            unplanned.gradient_arrived()


class Unplanned:
    """What is known of one planned module, or of the planned blocks of one model."""

    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind  # the model's class name, None if in use
        self.is_open = True  # nothing ran, and nothing was said
        self._is_said = self._has_run = self._is_in_eval = self._is_frozen_said = False
        self._cause: Callable[[], str] | None = None
        self._handles: dict[int, Any] = {}
        self._versions: list[int] = []
        self._versions_before: list[int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Unplanned:
        return Unplanned(self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return Unplanned, (self.kind,)

    def plan_runs(self) -> None:
        self.is_open, self._has_run = False, True
        self._versions_before = None
        self._unwatch()

    def frozen(self, module: nn.Module) -> None:
        if not self._is_frozen_said:
            self._is_frozen_said = True
            warnings.warn(
                f"{self._name(module)} runs without its plan while neither its parameters nor its "
                "inputs require grad: there is no backward to save memory in",
                stacklevel=_level_of_user(),
            )

    def taken_apart(self, module: nn.Module, part: str) -> None:
        name = self._name(module)
        text = (
            f"call the planned {name} itself, or plan the part that you call: {part} was used, "
            f"and the forward of {name} was not called"
        )
        self._watch_while_alive(module, lambda: text)

    def replaced(self, module: nn.Module, forward: Any) -> None:
        self.is_open = not self._is_said  # the new forward may not call the planned one
        self._watch_while_alive(module, functools.partial(_of_other, self._name(module), forward))

    def evaluated(self, module: nn.Module, output: Any) -> None:
        if self._is_said:
            return
        tensors = (leaf for leaf in leaves_in(output) if isinstance(leaf, Tensor))
        for node in {node for tensor in tensors if (node := tensor.grad_fn) is not None}:
            node.register_prehook(functools.partial(self._backward_of_eval, module))

    def gradient_arrived(self) -> None:
        if self._is_said or self._cause is None or is_of_a_plan():
            return
        if text := self._cause():
            self._is_said, self.is_open = True, False
            self._unwatch()
            warnings.warn(f"{text}, {_NOT_THE_PLAN}", stacklevel=_level_of_user())

    def _watch_while_alive(self, module: nn.Module, cause: Callable[[], str]) -> None:
        if self._is_said:
            return
        instead = ""
        # Told by the name, as importing the class takes long.
        if any(kind.__name__ == "LightningModule" for kind in type(module).__mro__):
            instead = (
                "plan the module that training_step calls, as in self.model = remat.rematerialize("
                f"self.model, ...): Lightning does not call the forward of {self._name(module)}"
            )
        alive = weakref.ref(module)
        self._cause = lambda: (instead or cause()) if alive() is not None else ""
        self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._handles:
                hook = parameter.register_post_accumulate_grad_hook(_Arrived(self))
                self._handles[id(parameter)] = hook

    def _unwatch(self) -> None:
        self._cause = None
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _backward_of_eval(self, module: nn.Module, _: Any) -> None:
        if self._is_said or self._is_in_eval:
            return
        self._is_in_eval, before = True, self._cause  # backward may stop before parameters
        self._versions = [parameter._version for parameter in module.parameters()]
        self._cause = functools.partial(self._of_eval, self._name(module))
        self._watch(module)
        queue_callback(functools.partial(self._after_eval, before))

    def _after_eval(self, before: Callable[[], str] | None) -> None:
        self._is_in_eval = False
        if before is None:
            self._unwatch()
        else:
            self._cause = before

    def _of_eval(self, name: str) -> str:
        # A module that trains by its plan may look for gradients here. Who trains in eval mode
        # comes again once parameters were updated.
        before, self._versions_before = self._versions_before, self._versions
        if self._has_run and before in (None, self._versions):
            return ""
        return f"call train() on {name} before a training step: in eval mode its own forward runs"

    def _name(self, module: nn.Module) -> str:
        return self.kind or type(module).__name__


@contextlib.contextmanager
def as_before(module: nn.Module) -> Generator[None]:
    kinds = [vars(type(part)) for part in module.modules()]
    all_of = [one for kind in kinds if isinstance(one := kind.get("_remat_unplanned"), Unplanned)]
    before = [(one.is_open, one._has_run) for one in all_of]
    try:
        with audits_paused():  # a check's steps are not the user's
            yield
    finally:
        for one, (is_open, has_run) in zip(all_of, before, strict=True):
            one.is_open, one._has_run = is_open, has_run


def _of_other(name: str, forward: Any) -> str:
    other = _innermost(forward)
    return (
        f"replace the forward of {name} before you plan it, or let {other} call the old one: "
        f"{other} replaces it and does not"
    )


def _innermost(forward: Any) -> str:
    """The name of what has taken a forward's place, below the wrappers of trainers around it."""
    name, function = type(forward).__name__, forward
    while function is not None:
        function = getattr(function, "func", function)  # of a partial
        code: Any = getattr(function, "__code__", None)  # the name may be taken over, not the code
        file: str = code.co_filename if code else _TORCH
        if file.startswith(str(Path(__file__).parent)):
            break  # the planned forward, which it only looks like
        name = name if file.startswith(_TORCH) else code.co_qualname
        function = getattr(function, "__wrapped__", None)
    return name


def _level_of_user() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH):
            break
        level, frame = level + 1, frame.f_back
    return level


_Forward = Callable[..., Any]
_TAKEN_BY = ("__getitem__", "__iter__")  # methods of a container that hand out its parts


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
        # Not on the user's module: it and ours could call each other without end (Accelerate).
        self.replacement = replacement
        type(instance)._remat_unplanned.replaced(instance, replacement)

    def __delete__(self, instance: Any) -> None:
        self.replacement = None


def replacement_of(module: nn.Module) -> Any:
    found = inspect.getattr_static(type(module), "forward")
    return found.replacement if isinstance(found, _OwnForward) else found


def class_of_user(
    base: type[nn.Module], model: nn.Module, loss_fn: LossFunction | None, **own: Any
) -> Any:
    """A subclass of `base` and of the model's class, with the model's class name and signature."""
    user = type(model)
    # Trainers read the class name to choose how the loss is shifted, and keep it in checkpoints.
    names = {"__module__": user.__module__, "__qualname__": user.__qualname__}
    # Trainers read the signature to choose data columns. torch.compile would break at every step.
    forward = _OwnForward(torch.compiler.disable(_like_users(user, base.forward, loss_fn)))
    ours = {
        "forward": forward,
        "original_module": model,
        "_remat_original_module": model,
        "_remat_loss_fn": staticmethod(loss_fn) if loss_fn else None,
        "_remat_unplanned": Unplanned(),
        # What `model.compile()` leaves in the shared `__dict__` would run unplanned.
        "_compiled_call_impl": property(lambda _: None, lambda _, compiled: None),
    }
    body = {"__doc__": base.__doc__, **names, **ours, **own}
    body |= {name: _noting(user, name) for name in _TAKEN_BY if hasattr(user, name)}
    clashing = [name for name in _names_of_user(model) if _is_ours(base, body, name)]
    body |= {name: _OfUser(name, user) for name in clashing}
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
        for table in () if instance is None else _tables(instance):
            if self.name in table:
                return table[self.name]
        of_class = self.of_class
        return of_class.__get__(instance, owner) if hasattr(of_class, "__get__") else of_class

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
        given.insert(place, target)  # keyword-only, so before **kwargs
    vars(method)["__signature__"] = found.replace(parameters=given)
    return method


_originals: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


def with_replaced(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """`model` with other modules in places of some: what holds one is copied, all else shared."""
    made = _rebuilt(model, dict(replaced))
    if made is not model:
        _originals[made] = model
    return made


def original_of_shell(model: nn.Module) -> nn.Module:
    return _originals.get(model, model)


def _rebuilt(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in known:  # a module that stands in several places stays one module
        return known[module]
    own = module._modules.items()
    children = {name: None if one is None else _rebuilt(one, known) for name, one in own}
    is_same = all(child is module._modules[name] for name, child in children.items())
    known[module] = module if is_same else shell_with(module, children)
    return known[module]


def shell_with(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    shell = object.__new__(type(module))  # its __init__ would make parameters
    shell.__dict__ = dict(module.__dict__)
    for name in ALL_HOOKS:
        shell.__dict__[name] = module.__dict__[name].copy()
    shell.__dict__["_modules"] = children
    return shell


def shell_running(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A copy of a module, one deep, whose class differs in its forward alone."""
    shell, kind = shell_with(module, dict(module._modules)), type(module)
    shell.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return shell
