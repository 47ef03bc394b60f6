"""Finds the function that a person names, or says from a file's text which one they may mean."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from remat.graph_capture.errors import FactoryError

# What a file's text says: which functions build a model, and where names are made without an
# import. A function named by mistake is not called: it may train.

_MODEL, _BATCH = "model", "batch"
_OTHERS = ("loss_fn", "target")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_TRAINS = {"backward", "zero_grad", "fit", "train_step", "train_epoch", "train_one_epoch"}
"""Methods that code which trains calls."""
_TRAINING = re.compile(r"train|fit|eval|test|valid|main|run|loss|epoch|step|collate|parse|get_args")
_OF_A_MODEL = re.compile(r"model|net(work)?$|module", re.IGNORECASE)


def _factory_of(module: ModuleType) -> Callable[[], dict[str, Any]] | None:
    """A factory of the module's variables `model` and `batch`; None if it lacks one."""
    from torch import nn  # verbs that read kept files do without torch

    if not isinstance(getattr(module, _MODEL, None), nn.Module) or not hasattr(module, _BATCH):
        return None

    def factory() -> dict[str, Any]:
        batch = getattr(module, _BATCH)
        parts = {name: getattr(module, name) for name in _OTHERS if hasattr(module, name)}
        if isinstance(batch, dict):  # forward takes a dict of a data loader by keywords
            return {"model": module.model, "kwargs": batch, **parts}
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        return {"model": module.model, "args": args, **parts}

    return factory


def _unseen_text(module: ModuleType, where: str) -> str:
    """Why an import of the file makes no `model` or `batch`; empty where the text does not say."""
    parsed = ast.parse(_source(module))
    missing = [name for name in (_MODEL, _BATCH) if not hasattr(module, name)]
    for statement in parsed.body:
        names = (part for part in _own(statement) if isinstance(part, ast.Name))
        stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        made = [name for name in missing if name in stored]
        is_guard = isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)
        if made and is_guard:  # what a training script guards so is not made when it is imported
            return (
                'move what builds the model and a batch above `if __name__ == "__main__"` (line '
                f"{statement.lineno}): {where} makes {' and '.join(made)} under it, which runs "
                "only as a script"
            )
    return f"{where} has a `{_MODEL}` and no `{_BATCH}`" if missing == [_BATCH] else ""


class _Written(NamedTuple):
    name: str
    gives: bool  # returns a value
    has_batch: bool  # that value may be a model with its batch, by its form
    trains: bool  # itself, or by what it calls in the file
    is_of_a_model: bool  # by its name

    @property
    def may_build(self) -> bool:
        # What returns a model with a batch builds one, even if it is called train_setup.
        is_named_otherwise = _TRAINING.match(self.name) is not None and not self.has_batch
        return self.gives and not self.trains and not is_named_otherwise


def _written_functions(module: ModuleType) -> dict[str, _Written]:
    parsed = ast.walk(ast.parse(_source(module)))
    found = {one.name: one for one in parsed if isinstance(one, _Function)}
    called = dict[str, set[str]]()
    for name, one in found.items():
        calls = (part.func for part in ast.walk(one) if isinstance(part, ast.Call))
        named = [call for call in calls if isinstance(call, ast.Attribute | ast.Name)]
        called[name] = {call.attr if isinstance(call, ast.Attribute) else call.id for call in named}
    training = {name for name, names in called.items() if names & _TRAINS}
    size = -1  # callers of callers train too: repeat until no name is added
    while size != len(training):
        size = len(training)
        training |= {name for name, names in called.items() if names & training}
    return {
        name: _Written(
            name, any(_values(one)), any(map(_is_with_batch, _values(one))), name in training,
            _OF_A_MODEL.search(name) is not None,
        )
        for name, one in found.items()
    }  # fmt: skip


def _returns_nothing(function: Any) -> bool:
    # The text of a decorated function is that of the one inside: the decorator may return more.
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    try:
        one = ast.parse(textwrap.dedent(inspect.getsource(function)))  # one in a block is indented
    except (OSError, TypeError, SyntaxError):
        return False
    found = next((part for part in ast.walk(one) if isinstance(part, ast.FunctionDef)), None)
    if found is None or isinstance(found.body[-1], ast.Raise):  # it ends in an error of its own
        return False
    is_generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in _own(found))
    return not is_generator and not any(_values(found))


def _source(module: ModuleType) -> str:
    """Empty for a module that has no text, such as a compiled one."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _own(statement: ast.AST) -> Iterator[ast.AST]:
    """What is written in a statement, but not in the functions and classes inside it."""
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, _Function | ast.ClassDef | ast.Lambda):
            yield part
            yield from _own(part)


def _values(function: _Function) -> Iterator[ast.expr]:
    """What its own returns return, `return None` left out."""
    for part in _own(function):
        value = part.value if isinstance(part, ast.Return) else None
        if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            yield value


def _is_with_batch(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return "model" in [key.value for key in value.keys if isinstance(key, ast.Constant)]
    return isinstance(value, ast.Tuple) and len(value.elts) in (2, 3)


_DEFAULT = "factory"  # the function of a file or module that is taken where none is named
_WRITE = (
    f"write def {_DEFAULT}(): return model, (x,); or name the model `model` and its batch `batch`"
)


class NamedFunction(NamedTuple):
    function: Callable[..., Any]
    where: str  # file or module, as a person wrote it
    name: str

    def __str__(self) -> str:
        return f"{self.where}:{self.name}"


@contextlib.contextmanager
def function_named(name: str) -> Generator[NamedFunction]:
    where, inside = _place(name)
    path = Path(where)
    is_on_disk = path.exists() and not (path / "__init__.py").exists()  # such a folder is a module
    is_file = where.endswith(".py") or "/" in where or is_on_disk
    folder = path.resolve().parent if is_file else Path.cwd()
    with _as_script(where, folder):  # until the call too: it may import or parse then
        module = _import_file(path) if is_file else _import_module(where)
        is_open = inside == _MODEL or (not inside and not hasattr(module, _DEFAULT))
        plain = _factory_of(module) if is_open else None
        if plain is not None:
            yield NamedFunction(plain, where, _MODEL)
            return
        inside = inside or _default_of(module, where)
        yield NamedFunction(_find(module, where, inside), where, inside)


def _place(name: str) -> tuple[str, str]:
    """The file or module, and the function in it; empty where none is named."""
    where, colon, inside = name.rpartition(":")
    if not colon or inside.endswith(".py"):  # folders may have colons in their names
        where, inside = name, ""
    if not where:
        raise FactoryError(
            f"write path/to/file.py:{_DEFAULT} or package.module:{_DEFAULT}: {name!r} names none"
        )
    return where, inside


@contextlib.contextmanager
def _as_script(where: str, folder: Path) -> Generator[None]:
    sys.path.insert(0, str(folder))
    kept = sys.argv
    sys.argv = [where]  # a parser in the file would read remat's own arguments
    try:
        yield
    finally:
        sys.argv = kept
        with contextlib.suppress(ValueError):  # the file may have taken it out itself
            sys.path.remove(str(folder))


def _import_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise FactoryError(f"name a file: {path} is a folder{_near_files(path / 'factory.py')}")
    if not path.is_file():
        raise FactoryError(f"there is no file {path}{_near_files(path)}")
    name = f"remat_factory_{path.stem}"  # or it could replace a library in sys.modules
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise FactoryError(f"{path} is not a Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look up their module there
    with explained_errors(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)  # imports only the parents of the module
    except (ImportError, ValueError) as error:
        raise FactoryError(f"there is no module {name}: {error}") from error
    if found is None:
        raise FactoryError(
            f"there is no module {name}: is it installed, or did you mean a file, "
            f"{name.replace('.', '/')}.py?"
        )
    with explained_errors(f"importing {name}"):
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
    if _returns_nothing(found):
        raise FactoryError(
            f"{_WRITE}: {name} of {where} returns nothing, so it was not called, and a factory "
            "returns the model and its batch"
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
    """The function to take where none is named; else an error that lists what there is."""
    if hasattr(module, _DEFAULT):
        return _DEFAULT
    own = _own_functions(module)
    written = _written_functions(module)
    building = [name for name in own if name in written and written[name].may_build]
    unseen = _unseen_text(module, where)  # the text shows where the model is built
    if unseen or not building:
        is_given = [name for name in own if name in written and written[name].gives]
        nothing = f"and nothing is returned by {', '.join(own)}" if own else "and no other"
        other = f"and {', '.join(own)} train, or build no model" if is_given else nothing
        raise FactoryError(f"{unseen or f'{where} has no function {_DEFAULT}, {other}'}: {_WRITE}")
    has = f"{where} has no function {_DEFAULT}. It has {', '.join(own)}"
    with_batch = [name for name in building if written[name].has_batch]
    alone = [name for name in building if written[name].is_of_a_model]
    if alone and not with_batch:  # it needs one line around it: show that line
        name, given = alone[0], "" if _is_called_with_nothing(own[alone[0]]) else "..."
        raise FactoryError(
            f"{has}: {name} returns a model without a batch, so write def {_DEFAULT}(): return "
            f"{name}({given}), (x,)"
        )
    proposed = with_batch or building
    # The example in the error should work as it is written.
    ready = [name for name in proposed if _is_called_with_nothing(own[name])]
    raise FactoryError(
        f"{has}: name the one that returns the model and its batch, such as "
        f"{where}:{next(iter(ready or proposed))}"
    )


def _own_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        key: value
        for key, value in vars(module).items()
        # What it imports is not its own, and what begins with _ not for others.
        if inspect.isfunction(value) and value.__module__ == module.__name__ and key[0] != "_"
    }


def _is_called_with_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def explained_errors(doing: str) -> Generator[None]:
    try:
        yield
    except FactoryError:  # one of ours is in one line already
        raise
    except SystemExit as error:  # argparse ends Python so, which is no Exception
        raise FactoryError(
            "give required arguments of a parser defaults, as a factory gets no command line; a "
            "batch size may be an argument of the factory.\n"
            f"{doing} ended Python with SystemExit: {error} ({_raised_at(error)})"
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise FactoryError(f"{doing} raised {what} ({_raised_at(error)})") from error


def _raised_at(error: BaseException) -> str:
    """``file:line`` of the innermost frame of the user's own code, else of a library's."""
    if isinstance(error, SyntaxError) and error.filename:  # has no frame in the file
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    # `<` begins the frames of importlib, which no one can open.
    theirs = [f for f in frames if Path(f.filename).parent != ours and f.filename[0] != "<"]
    standard = sysconfig.get_path("stdlib")
    others = [f for f in theirs if "site-packages" not in f.filename]
    own = [f for f in others if not f.filename.startswith(standard)]
    frame = (own or theirs or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"
