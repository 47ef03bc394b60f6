"""Loads the model and the batch that a factory makes, by the name that a person gives it."""

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
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from remat.graph_capture.devices.known_devices import check_device, is_cuda
from remat.graph_capture.errors import FactoryError

if TYPE_CHECKING:
    from torch import nn


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
    with _explained_errors(f"importing {path}"):
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
    with _explained_errors(f"importing {name}"):
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
def _explained_errors(doing: str) -> Generator[None]:
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
    with _explained_errors(f"{title}{given}"):
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
