"""Tracing runs the user's forward. This restores the modules and the random streams after it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import is_users, line_of_user, source_of
from remat.graph_capture.python_state.state_guards import PythonState
from remat.graph_capture.python_state.state_slots import MISSING, DictItem, copied, holds, refill
from remat.graph_capture.torch_private.core import (
    CallWatcher,
    FakeTensor,
    outside_of_transforms,
    pytree,
)

_Attributes = dict[str, tuple[Any, Any]]  # each with a shallow copy if it is a plain container


@dataclass(frozen=True)
class Written:
    """An attribute of a module that forward has set, changed in place or removed."""

    path: str
    module: nn.Module
    name: str
    before: Any  # the object that was there
    held: Any  # that, or a copy from then where it is a container

    @property
    def text(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def place(self) -> DictItem:
        return DictItem(self.text, vars(self.module), self.name, self.before)

    @property
    def value(self) -> Any:
        """None where it was removed."""
        return vars(self.module).get(self.name)


class ModuleAttributes:
    """Every attribute of every module as it is now, one container deep; not those in `but`."""

    def __init__(self, model: nn.Module, but: frozenset[str] = frozenset()) -> None:
        self._before = [(path, m, snapshot(vars(m), but)) for path, m in model.named_modules()]
        self._but = but

    def written(self) -> list[Written]:
        return [
            Written(path, module, name, *_before(module, name, attributes))
            for path, module, attributes in self._before
            for name in changed_names(vars(module), attributes, self._but)
            if name not in OF_TORCH  # hooks are compared elsewhere
            if not (name.startswith("_") and type(module).__module__.startswith("torch."))
        ]

    def restore(self) -> None:
        for _, module, attributes in self._before:
            restore_names(vars(module), attributes, vars(module), self._but)


OF_TORCH = frozenset(vars(nn.Module()))  # tables of parameters, hooks and modules, and its mode


def _before(module: nn.Module, name: str, attributes: _Attributes) -> tuple[Any, Any]:
    if name not in attributes:
        return (getattr(type(module), name, MISSING),) * 2  # else it was the class's
    value, kept = attributes[name]
    return value, value if kept is None else kept


@contextlib.contextmanager
def restored_after(model: nn.Module) -> Generator[ModuleAttributes]:
    """Restore every submodule's attributes and all random streams on leaving."""
    attributes = ModuleAttributes(model)
    # `fork_rng` would start CUDA where nothing has used it yet.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    # A caller may be under ``no_grad`` or ``inference_mode``; to leave that puts gradients on too.
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices):
        try:
            yield attributes
        finally:
            attributes.restore()
            random.setstate(python)
            np.random.set_state(numpy)


def snapshot(space: Mapping[str, Any], but: frozenset[str] = frozenset()) -> _Attributes:
    """What names stand for, one container deep; not those in `but`."""
    held = ((name, value) for name, value in space.items() if name not in but)
    kinds = (dict, list, set)
    return {n: (value, copied(value) if isinstance(value, kinds) else None) for n, value in held}


def changed_names(
    now: Mapping[str, Any], attributes: _Attributes, but: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Names that are new, gone, or stand for something else than in a `snapshot`."""
    yield from (name for name in now if name not in attributes and name not in but)
    for name, (value, kept) in attributes.items():
        is_another = name not in now or now[name] is not value
        if is_another or (kept is not None and not holds(value, kept)):
            yield name


def restore_names(
    now: Mapping[str, Any], attributes: _Attributes, owner: Any, but: frozenset[str] = frozenset()
) -> None:
    """Have all names stand for what they did; `now` are those of `owner`, or a dict itself."""
    for name in list(changed_names(now, attributes, but)):
        if name not in attributes:
            owner.pop(name) if owner is now else delattr(owner, name)
            continue
        value, kept = attributes[name]
        owner.__setitem__(name, value) if owner is now else setattr(owner, name, value)
        if kept is not None:  # in place: others may hold the same container
            refill(value, kept)


_NUMPY = "numpy.random"
_PYTHON = "random"
_SEEDS = ("manual_seed", "seed", "set_rng_state")  # they put torch's generator elsewhere


def streams() -> dict[str, Any]:
    _, keys, *rest = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())
    return {  # torch's default stream is not among them: it is part of the plan
        _PYTHON: random.getstate(),
        _NUMPY: (keys.tobytes(), *rest),  # as bytes, since arrays compare element by element
    }


def require_unmoved(kind: str, before: dict[str, Any], again: Callable[[], Any]) -> None:
    """Refuse a forward that has moved a stream; `again` runs it, to find the line that draws."""
    now = streams()
    moved = next((name for name in before if now[name] != before[name]), None)
    if moved is None:
        return
    line = _line_that_draws(again, moved)
    raise CaptureError(
        "draw with torch (torch.rand, torch.randint), and use the tensor without .item(): forward "
        f"of {kind} draws from {moved}{f' ({line})' if line else ''}, and a plan would have the "
        "same numbers at each step.\n"
        "Or draw outside forward and pass the number as an argument; remat.rematerialize without "
        "a batch makes a plan for each value"
    )


def _line_that_draws(run: Callable[[], Any], moved: str) -> str:
    """``file:line`` of the user's after which a stream first stands elsewhere while `run` runs."""
    before, found, last = streams()[moved], list[str](), [""]

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_users(frame) or found:
            return None
        if event in ("line", "return"):  # events come before their line has run
            if streams()[moved] != before:
                found.append(last[0])
                return None
            last[0] = source_of(frame)
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        with contextlib.suppress(Exception):  # the refusal that follows says more
            run()
    finally:
        sys.settrace(tracing)
    return found[0] if found else ""


@contextlib.contextmanager
def no_seed(kind: str) -> Generator[None]:
    def refused(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise CaptureError(
                f"call torch.{name} outside forward, before the step: forward of {kind} calls "
                f"it{line_of_user()}, and a plan's step draws from the stream as it stands"
            )

        return refuse

    places = [(module, name) for module in (torch, torch.random) for name in _SEEDS]
    before = [(module, name, getattr(module, name)) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, refused(name))
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


_WRITES_NO_VALUES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_"})
_STATISTICS = frozenset({"num_batches_tracked", "running_mean", "running_var"})
_IN_PLACE = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__",
    "__irshift__",
})  # fmt: skip


class NoForeignWrites(CallWatcher):
    """While forward is traced, refuse code that writes into a constant of the graph."""

    def __init__(self, kind: str, state: PythonState) -> None:
        super().__init__()
        self.kind, self.state = kind, state

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Parameters, buffers and arguments are inputs. Other tensors are constants.
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__")
        is_in_place = is_in_place and name not in _WRITES_NO_VALUES
        targets = args[:1] if is_in_place or name in _IN_PLACE else ()
        for leaf in pytree.tree_leaves([*targets, kwargs.get("out")]):
            leaf = outside_of_transforms(leaf)  # there, the trace's own are plain tensors to Python
            while isinstance(leaf, FakeTensor):  # the trace's own is a view of a constant, or none
                leaf = leaf._base
            is_own = type(leaf) in (Tensor, nn.Parameter)
            if isinstance(leaf, Tensor) and is_own and line_of_user():
                raise self.refused(leaf)
        return func(*args, **kwargs)

    def refused(self, tensor: Tensor) -> CaptureError:
        name = next(self._names_of(tensor), f"a tensor of shape {list(tensor.shape)}")
        owner, _, of = name.rpartition(".")
        it = of if of in _STATISTICS else "it"
        # Those of a batch norm that is not a submodule: they are buffers already.
        way = f"register {name} as a buffer (register_buffer) of the model, or pass it to forward"
        if of in _STATISTICS:
            way = f"call eval() on {owner}, or make it a submodule of the model"
        return CaptureError(
            f"{way}: forward of {self.kind} writes into {it}{line_of_user()}, which is neither "
            "parameter, buffer nor argument of the step, so a plan's step would not"
        )

    def _names_of(self, tensor: Tensor) -> Iterator[str]:
        for place in self.state.places:
            value: Any = place.value
            if value is tensor:
                yield place.text
            items = list(value.values()) if isinstance(value, Mapping) else value
            if isinstance(items, (list, tuple)) and any(item is tensor for item in items):
                yield place.text


class GradientOrder:
    """The order in which a traced backward makes gradients, which autograd's engine decides."""

    def __init__(self) -> None:
        self.places: list[int] = []  # of those watched last, as gradients came

    def watch(self, parameters: Iterable[Tensor]) -> None:
        self.places.clear()  # a trace runs forward more than once
        for place, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_hook(lambda _, place=place: self.places.append(place))
