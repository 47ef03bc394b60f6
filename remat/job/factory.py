"""Loads the model and the batch that a factory makes, by the name that a person gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from remat.graph_capture.devices.known_devices import check_device, is_cuda
from remat.graph_capture.errors import FactoryError
from remat.job.named_function import explained_errors, function_named

if TYPE_CHECKING:
    from torch import nn

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_WITHOUT_DEFAULT = (inspect.Parameter.POSITIONAL_ONLY, *_BY_KEYWORD)
_KEYS = ("model", "args", "kwargs", "loss_fn", "target")
_RETURNS = (
    "a factory returns (model, args), (model, args, kwargs), or a dict with model, args and, "
    "where there are any, kwargs, loss_fn, target"
)


@dataclass(frozen=True)
class Loaded:
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    target: Any = None

    def on(self, device: str) -> Loaded:
        """The same with model, loss and batch on `device`, if it is a CUDA device."""
        from torch import nn

        check_device(device)
        if not is_cuda(device):  # a device of the table: the model stays
            return self
        loss_fn = self.loss_fn
        return Loaded(
            self.model.to(device), _moved(self.args, device), _moved(self.kwargs, device),
            loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn,
            _moved(self.target, device),
        )  # fmt: skip


def _moved(tree: Any, device: str) -> Any:
    from torch import Tensor

    from remat.graph_capture.python_state.tensor_attributes import with_attributes_of
    from remat.graph_capture.torch_private.core import pytree

    made: dict[int, Tensor] = {}  # a tensor that is given twice stays one

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            # Without detach, the copy of a leaf that requires grad would get no gradient.
            other = leaf.detach().to(device).requires_grad_(leaf.requires_grad)
            made[id(leaf)] = with_attributes_of(leaf, other)
        return made[id(leaf)]

    return pytree.tree_map(moved, tree)


def load_model(name: str, **sizes: int) -> Loaded:
    """Import what `name` names, call it, and read what it returns.

    `name` is ``path/to/file.py:function``, which can import from its own folder, or
    ``package.module:function``. The function may be left out if it is ``factory``, or if there are
    variables ``model`` and ``batch``. `sizes` are arguments for it, such as ``batch=8``. All that
    goes wrong is a `FactoryError`.
    """
    with function_named(name) as named:
        return call(named.function, str(named), sizes, f"factory {named.name} of {named.where}")


def call(build: Callable[..., Any], name: str, sizes: Mapping[str, int], title: str = "") -> Loaded:
    title = title or f"factory {name}"
    _require_arguments(build, title, sizes)
    given = "".join(f", {size}={value}" for size, value in sizes.items())
    with explained_errors(f"{title}{given}"):
        built = build(**sizes)
    return _read(built, name)


def _require_arguments(factory: Callable[..., Any], title: str, sizes: Mapping[str, int]) -> None:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables of C have no signature
        return
    keywords = [one.name for one in parameters.values() if one.kind in _BY_KEYWORD]
    bare = [one for one in parameters.values() if one.default is one.empty]
    if needed := [p.name for p in bare if p.kind in _WITHOUT_DEFAULT and p.name not in sizes]:
        raise FactoryError(
            f"give defaults for {', '.join(needed)}, or write def factory(): return model, (x,), "
            f"which calls it: {title} is called without"
        )
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for size in sizes:
        if size not in keywords:
            has = f"it takes {', '.join(keywords)}" if keywords else "it takes none"
            raise FactoryError(
                f"write it as def factory({size}=8): ..., and build the batch of that size: "
                f"{title} takes no argument {size!r}, {has}"
            )


def _read(built: Any, name: str) -> Loaded:
    parts: dict[str, Any] = _parts(built, name)
    from torch import Tensor, nn

    if not isinstance(parts.get("model"), nn.Module):
        found = type(parts.get("model")).__name__
        raise FactoryError(f"{name} returned a {found} as model, not an nn.Module: {_RETURNS}")
    args: Any = parts.get("args", ())
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise FactoryError(f"{name} returned a {type(args).__name__} as args: {_RETURNS}")
    parts["args"] = tuple(cast("tuple[Any, ...]", args))
    return Loaded(**parts)


def _parts(built: Any, name: str) -> dict[str, Any]:
    if isinstance(built, dict):
        parts = cast("dict[str, Any]", built)
        if unknown := [str(key) for key in parts if key not in _KEYS]:
            raise FactoryError(f"{name} returned unknown keys {', '.join(unknown)}: {_RETURNS}")
        return dict(parts)  # a copy: `_read` writes to it, and the factory may keep its own
    if isinstance(built, tuple) and len(cast("tuple[Any, ...]", built)) in (2, 3):
        return dict(zip(_KEYS, cast("tuple[Any, ...]", built), strict=False))
    from torch import nn

    if isinstance(built, nn.Module):
        raise FactoryError(
            f"write def factory(): return {name.rpartition(':')[2]}(), (x,): {name} returned a "
            f"model without a batch, a {type(built).__name__}"
        )
    raise FactoryError(f"{name} returned a {type(built).__name__}: {_RETURNS}")
