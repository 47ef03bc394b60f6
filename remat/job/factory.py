"""Loads the model and the batch that a factory makes, by the name that a person gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from remat.graph_capture.devices.device_table import check_device, is_cuda
from remat.graph_capture.errors import FactoryError
from remat.job.named_function import explained, function_named

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
    """A model and the batch it is trained on, as its factory made them."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    target: Any = None

    def on(self, device: str) -> Loaded:
        """With the model and the batch moved there if it is a CUDA device of this machine.

        Raises
        ------
        DeviceError : there is no such device.
        """
        from torch import nn

        check_device(device)
        if not is_cuda(device):
            return self
        loss_fn = self.loss_fn
        return replace(
            self,
            model=self.model.to(device),
            args=_moved(self.args, device),
            kwargs=_moved(self.kwargs, device),
            loss_fn=loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn,
            target=_moved(self.target, device),
        )


def _moved(tree: Any, device: str) -> Any:
    """The same with its tensors on `device`, those that require grad as leaves again."""
    import torch.utils._pytree as pytree
    from torch import Tensor

    from remat.graph_capture.python_state.tensor_attributes import with_attributes_of

    made: dict[int, Tensor] = {}  # a tensor that is given twice stays one

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            other = leaf.detach().to(device).requires_grad_(leaf.requires_grad)
            made[id(leaf)] = with_attributes_of(leaf, other)
        return made[id(leaf)]

    return pytree.tree_map(moved, tree)


def load(name: str, **sizes: int) -> Loaded:
    """Import what `name` names, call it, and read what it returns.

    Parameters
    ----------
    name : ``path/to/file.py:function``, from anywhere on disk, which can import what is in its own
        folder; or ``package.module:function``. The function may be left out if it is ``factory``,
        or if there are variables ``model`` and ``batch`` instead.
    **sizes : keyword arguments for the factory, such as ``batch=8``.

    Raises
    ------
    FactoryError : the file or factory is missing, raises, takes no such argument, or returns
        something else.
    """
    with function_named(name) as named:
        title = f"factory {named.name} of {named.where}"
        return call(named.function, str(named), sizes, title)


def call(
    factory: Callable[..., Any], name: str, sizes: Mapping[str, int], title: str = ""
) -> Loaded:
    """Call a factory with the sizes that it is to build, and read what it returns.

    Raises
    ------
    FactoryError : it raises, takes no such argument, or returns something else.
    """
    title = title or f"factory {name}"
    _require_arguments(factory, title, sizes)
    given = "".join(f", {size}={value}" for size, value in sizes.items())
    with explained(f"{title}{given}"):
        built = factory(**sizes)
    return _read(built, name)


def _require_arguments(factory: Callable[..., Any], title: str, sizes: Mapping[str, int]) -> None:
    """Raise `FactoryError` unless the factory takes each of the sizes, and needs nothing else."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    keywords = [one.name for one in parameters.values() if one.kind in _BY_KEYWORD]
    needed = [
        one.name
        for one in parameters.values()
        if one.default is one.empty and one.kind in _WITHOUT_DEFAULT and one.name not in sizes
    ]
    if needed:
        raise FactoryError(
            f"{title} needs {', '.join(needed)}, and is called without: give defaults, or write "
            "def factory(): return model, (x,), which calls it"
        )
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for size in sizes:
        if size not in keywords:
            has = f"it takes {', '.join(keywords)}" if keywords else "it takes none"
            raise FactoryError(
                f"{title} takes no argument {size!r}, {has}: write it as "
                f"def factory({size}=8): ..., and build the batch of that size"
            )


def _read(built: Any, name: str) -> Loaded:
    """Check what the factory returned, and give each part its name."""
    parts: dict[str, Any] = _parts(built, name)
    from torch import Tensor, nn

    if not isinstance(parts.get("model"), nn.Module):
        found = type(parts.get("model")).__name__
        raise FactoryError(f"{name} returned a model that is a {found}, no nn.Module: {_RETURNS}")
    args: Any = parts.get("args", ())
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise FactoryError(f"{name} returned args that are a {type(args).__name__}: {_RETURNS}")
    parts["args"] = tuple(cast("tuple[Any, ...]", args))
    return Loaded(**parts)


def _parts(built: Any, name: str) -> dict[str, Any]:
    if isinstance(built, dict):
        parts = cast("dict[str, Any]", built)
        unknown = [str(key) for key in parts if key not in _KEYS]
        if unknown:
            raise FactoryError(f"{name} returned unknown keys {', '.join(unknown)}: {_RETURNS}")
        return dict(parts)
    if isinstance(built, tuple) and len(cast("tuple[Any, ...]", built)) in (2, 3):
        return dict(zip(_KEYS, cast("tuple[Any, ...]", built), strict=False))
    from torch import nn

    if isinstance(built, nn.Module):
        raise FactoryError(
            f"{name} returned a model without a batch, a {type(built).__name__}: write "
            f"def factory(): return {name.rpartition(':')[2]}(), (x,)"
        )
    raise FactoryError(f"{name} returned a {type(built).__name__}: {_RETURNS}")
