"""The function that a person names as ``path/to/file.py:function``, or as ``path/to/file.py``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from remat.graph_capture.errors import FactoryError
from remat.job.plain_file import (
    MODEL,
    factory_of,
    returns_nothing,
    unseen_text,
    written_functions,
)

DEFAULT = "factory"
"""The function of a file or module that is taken where none is named."""
_WRITE = (
    f"write def {DEFAULT}(): return model, (x,); or name the model `model` and its batch `batch`"
)


@dataclass(frozen=True)
class NamedFunction:
    """A function, with its file or module as a person wrote it, and its name in there."""

    function: Callable[..., Any]
    where: str
    name: str

    def __str__(self) -> str:
        return f"{self.where}:{self.name}"


@contextlib.contextmanager
def function_named(name: str) -> Generator[NamedFunction]:
    """Import what `name` names. The modules beside it can be imported until the context ends.

    Until then the command line is that of a script without arguments: a parser that the file has
    would else read remat's own.

    Parameters
    ----------
    name : ``path/to/file.py:function``, ``package.module:function``, or either without a function,
        which takes `DEFAULT`, else the variables ``model`` and ``batch``.

    Raises
    ------
    FactoryError : there is no such file, module or function, or importing it raises.
    """
    where, inside = _place(name)
    path = Path(where)
    is_file = where.endswith(".py") or "/" in where or _is_on_disk(path)
    folder = path.resolve().parent if is_file else Path.cwd()
    with _importable(folder), _without_arguments(where):
        module = _import_file(path) if is_file else _import_module(where)
        is_open = inside == MODEL or (not inside and not hasattr(module, DEFAULT))
        plain = factory_of(module) if is_open else None
        if plain is not None:
            yield NamedFunction(plain, where, MODEL)
            return
        inside = inside or _default_of(module, where)
        yield NamedFunction(_find(module, where, inside), where, inside)


def _place(name: str) -> tuple[str, str]:
    """The file or module, and the function in it; no function where none is named."""
    where, colon, inside = name.rpartition(":")
    # Folders may have colons in their names.
    if not colon or inside.endswith(".py"):
        where, inside = name, ""
    if not where:
        raise FactoryError(
            f"{name!r} names no factory: write path/to/file.py:{DEFAULT} or "
            f"package.module:{DEFAULT}"
        )
    return where, inside


def _is_on_disk(path: Path) -> bool:
    """Whether it is a file or folder here; a folder that is a package is a module."""
    return path.exists() and not (path / "__init__.py").exists()


@contextlib.contextmanager
def _importable(folder: Path) -> Generator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _without_arguments(where: str) -> Generator[None]:
    kept = sys.argv
    sys.argv = [where]
    try:
        yield
    finally:
        sys.argv = kept


def _import_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise FactoryError(f"{path} is a folder: name a file{_near_files(path / 'factory.py')}")
    if not path.is_file():
        raise FactoryError(f"there is no file {path}{_near_files(path)}")
    name = f"remat_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise FactoryError(f"{path} is not a Python file: its name should end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with explained(f"importing {path}"):
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
    with explained(f"importing {name}"):
        return importlib.import_module(name)


def _near_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder} either"
    names = sorted(file.name for file in folder.glob("*.py"))
    near = difflib.get_close_matches(path.name, names, n=3) or names[:5]
    here = "This folder" if str(folder) == "." else str(folder)
    return f". {here} has {', '.join(near)}" if near else f", nor any .py file in {folder}"


def _find(module: ModuleType, where: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if returns_nothing(found):
        raise FactoryError(
            f"{name} of {where} returns nothing, so it was not called. A factory returns the model "
            f"and its batch: {_WRITE}"
        )
    if callable(found):
        return cast("Callable[..., Any]", found)
    if found is not None:
        raise FactoryError(f"{name} of {where} is a {type(found).__name__}, not a function")
    own = list(_own_functions(module))
    near = difflib.get_close_matches(name, own, n=1)
    has = f"It has {', '.join(own)}" if own else "It has no function"
    hint = f". Did you mean {where}:{near[0]}?" if near else ""
    raise FactoryError(f"{where} has no factory {name}. {has}{hint}")


def _default_of(module: ModuleType, where: str) -> str:
    """The name of the function to take where none is named.

    Raises
    ------
    FactoryError : there is no function of that name; lists those that there are.
    """
    if hasattr(module, DEFAULT):
        return DEFAULT
    own = _own_functions(module)
    written = written_functions(module)
    building = [name for name in own if name in written and written[name].may_build]
    unseen = unseen_text(module, where)
    if unseen or not building:
        is_given = [name for name in own if name in written and written[name].gives]
        nothing = f"and nothing is returned by {', '.join(own)}" if own else "and no other"
        other = f"and {', '.join(own)} train, or build no model" if is_given else nothing
        raise FactoryError(f"{unseen or f'{where} has no function {DEFAULT}, {other}'}: {_WRITE}")
    has = f"{where} has no function {DEFAULT}. It has {', '.join(own)}"
    with_batch = [name for name in building if written[name].has_batch]
    alone = [name for name in building if written[name].is_of_a_model]
    if alone and not with_batch:
        name, given = alone[0], "" if _is_called_with_nothing(own[alone[0]]) else "..."
        raise FactoryError(
            f"{has}: {name} returns a model without a batch, so write def {DEFAULT}(): return "
            f"{name}({given}), (x,)"
        )
    proposed = with_batch or building
    ready = [name for name in proposed if _is_called_with_nothing(own[name])]
    raise FactoryError(
        f"{has}: name the one that returns the model and its batch, such as "
        f"{where}:{next(iter(ready or proposed))}"
    )


def _own_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that are written in the module and meant for others, in their order."""
    return {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and key[0] != "_"
    }


def _is_called_with_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def explained(doing: str) -> Generator[None]:
    """Turn whatever the user's code raises into one line that names its place."""
    try:
        yield
    except FactoryError:
        raise
    except SystemExit as error:
        raise FactoryError(
            f"{doing} ended Python by SystemExit: {error} ({_raised_at(error)}). It is given no "
            "arguments of a command line, so those that a parser requires need defaults; a batch "
            "size may be an argument of the factory"
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise FactoryError(f"{doing} raised {what} ({_raised_at(error)})") from error


def _raised_at(error: BaseException) -> str:
    """``file:line`` of the innermost frame of the user's own code, else of a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    theirs = [f for f in frames if Path(f.filename).parent != ours and f.filename[0] != "<"]
    standard = sysconfig.get_path("stdlib")
    own = [
        f
        for f in theirs
        if "site-packages" not in f.filename and not f.filename.startswith(standard)
    ]
    frame = (own or theirs or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"
