"""Says once that a planned module is trained without its plan, and what keeps the plan from it.

Four things do: eval mode, a forward that has taken the place of the planned one, Lightning, which
calls `training_step`, and a caller who takes the module apart. Whoever calls the user's original
module means to, and is told nothing. Parameters are watched only once one of the four is seen.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.torch_private.core import queue_callback
from remat.graph_capture.tracing.outputs import leaves_in
from remat.rewriter.checking.audit import audits_paused
from remat.rewriter.guards.backward import OnlyLooks, is_of_a_plan

_TORCH = str(Path(torch.__file__).parent)
_NOT_THE_PLAN = "so its parameters received gradients, and its plan did not run"


class _Arrived(OnlyLooks):
    """The hook on a parameter. It does not keep alive whom it tells."""

    def __init__(self, unplanned: Unplanned) -> None:
        self._told = weakref.ref(unplanned)

    def __call__(self, parameter: Tensor) -> None:
        if (unplanned := self._told()) is not None:
            unplanned.gradient_arrived()


class Unplanned:
    """What is known of one planned module, or of the planned blocks of one model.

    `kind` is the name of the model's class, None for that of the module that is used. `is_open`
    says that no plan has run yet, and nothing was said.
    """

    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind
        self.is_open = True
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
                f"{self._name(module)} runs unplanned as long as neither its parameters nor its "
                "inputs require grad: there is no backward to save memory in",
                stacklevel=_level_of_user(),
            )

    def taken_apart(self, module: nn.Module, part: str) -> None:
        self._watch_while_alive(module, functools.partial(_of_parts, self._name(module), part))

    def replaced(self, module: nn.Module, forward: Any) -> None:
        # The new forward may not call the planned one.
        self.is_open = not self._is_said
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
        if _is_lightning(module):
            cause = functools.partial(_of_lightning, self._name(module))
        alive = weakref.ref(module)
        self._cause = lambda: cause() if alive() is not None else ""
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
        # Backward may stop at inputs: what counts is whether it goes on to parameters.
        self._is_in_eval, before = True, self._cause
        self._versions = [parameter._version for parameter in module.parameters()]
        self._cause = functools.partial(self._of_eval, self._name(module))
        self._watch(module)
        end = functools.partial(self._after_eval, before)
        queue_callback(end)

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
        return (
            f"call train() on {name} before a training step: it is in eval mode, where the model's "
            "own forward runs"
        )

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


def _is_lightning(module: nn.Module) -> bool:
    # Told by the name, as importing the class takes long.
    return any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)


def _of_lightning(name: str) -> str:
    return (
        "plan the module that training_step calls, as in self.model = "
        f"remat.rematerialize(self.model, ...): of {name} Lightning calls training_step and not "
        "forward"
    )


def _of_parts(name: str, part: str) -> str:
    return (
        f"call the planned {name} itself, or plan the part that you call: {part} of it was used, "
        "and its forward was not called"
    )


def _of_other(name: str, forward: Any) -> str:
    other = _innermost(forward)
    return (
        f"replace the forward of {name} before it is planned, or let {other} call the one that was "
        f"there: {other} has taken its place and does not"
    )


def _innermost(forward: Any) -> str:
    """The name of what has taken a forward's place, below the wrappers of trainers around it."""
    name, function = type(forward).__name__, forward
    while function is not None:
        function = getattr(function, "func", function)  # of a partial
        # It may have taken over the name of the forward that it replaces, but its code has not.
        code: Any = getattr(function, "__code__", None)
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
