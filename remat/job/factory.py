"""Loads the model that a person names as ``path/to/file.py:factory``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from remat.graph_capture.devices.device_table import check_device, is_cuda
from remat.graph_capture.errors import FactoryError

if TYPE_CHECKING:
    from torch import nn

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
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

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(moved, tree)


def load(name: str, **sizes: int) -> Loaded:
    """Import what `name` names, call it, and read what it returns.

    Parameters
    ----------
    name : ``path/to/file.py:factory``, from anywhere on disk, which can import what is in its own
        folder; or ``package.module:factory``.
    **sizes : keyword arguments for the factory, such as ``batch=8``.

    Raises
    ------
    FactoryError : the file or factory is missing, raises, takes no such argument, or returns
        something else.
    """
    where, colon, factory_name = name.rpartition(":")
    if not colon or not where or not factory_name:
        raise FactoryError(
            f"{name!r} names no factory: write path/to/file.py:factory or package.module:factory"
        )
    is_file = where.endswith(".py") or "/" in where
    folder = Path(where).resolve().parent if is_file else Path.cwd()
    with _importable(folder):
        module = _import_file(Path(where)) if is_file else _import_module(where)
        factory = _find(module, where, factory_name)
        return call(factory, name, sizes, f"factory {factory_name} of {where}")


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
    with _explained(f"{title}{given}"):
        built = factory(**sizes)
    return _read(built, name)


def _require_arguments(factory: Callable[..., Any], title: str, sizes: Mapping[str, int]) -> None:
    """Raise `FactoryError` unless the factory takes each of the sizes as a keyword."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    keywords = [one.name for one in parameters.values() if one.kind in _BY_KEYWORD]
    for size in sizes:
        if size not in keywords:
            has = f"it takes {', '.join(keywords)}" if keywords else "it takes none"
            raise FactoryError(
                f"{title} takes no argument {size!r}, {has}: write it as "
                f"def factory({size}=8): ..., and build the batch of that size"
            )


@contextlib.contextmanager
def _importable(folder: Path) -> Generator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FactoryError(f"there is no file {path}{_near_files(path)}")
    name = f"remat_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise FactoryError(f"{path} is not a Python file: its name should end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _explained(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise FactoryError(f"there is no module {name}: {error}") from error
    if found is None:
        raise FactoryError(
            f"there is no module {name}: is it installed here, or did you mean a file, "
            f"{name.replace('.', '/')}.py?"
        )
    with _explained(f"importing {name}"):
        return importlib.import_module(name)


def _near_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder} either"
    names = sorted(file.name for file in folder.glob("*.py"))
    near = difflib.get_close_matches(path.name, names, n=3) or names[:5]
    return f". {folder} has {', '.join(near)}" if near else f", nor any .py file in {folder}"


def _find(module: ModuleType, where: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return cast("Callable[..., Any]", found)
    if found is not None:
        raise FactoryError(f"{name} of {where} is a {type(found).__name__}, not a function")
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and key[0] != "_"
    ]
    near = difflib.get_close_matches(name, own, n=1)
    has = f"It has {', '.join(own)}" if own else "It has no function"
    hint = f". Did you mean {where}:{near[0]}?" if near else ""
    raise FactoryError(f"{where} has no factory {name}. {has}{hint}")


@contextlib.contextmanager
def _explained(doing: str) -> Generator[None]:
    """Turn whatever the user's code raises into one line that names its place."""
    try:
        yield
    except FactoryError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise FactoryError(f"{doing} raised {what} ({_raised_at(error)})") from error


def _raised_at(error: BaseException) -> str:
    """``file:line`` of the innermost frame outside the import machinery and this file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<")]
    own = [f for f in theirs if "site-packages" not in f.filename]
    frame = (own or theirs or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"


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
    raise FactoryError(f"{name} returned a {type(built).__name__}: {_RETURNS}")
