"""What a file is for by its text: variables of a model and its batch, and which functions build.

A name that is made under ``if __name__ == "__main__"`` or in a function is none of the module's
when the file is imported. The text of the file says so, and where.
A function that is only named by mistake is never called: it may train for an epoch.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

MODEL, BATCH = "model", "batch"
OTHERS = ("loss_fn", "target")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_TRAINS = {"backward", "zero_grad", "fit", "train_step", "train_epoch", "train_one_epoch"}
"""Methods that code which trains calls."""
_OF_TRAINING = re.compile(
    r"^(train|fit|eval|test|valid|main|run|loss|epoch|step|collate|parse|get_args)"
)
_OF_A_MODEL = re.compile(r"model|net(work)?$|module", re.IGNORECASE)


def factory_of(module: ModuleType) -> Callable[[], dict[str, Any]] | None:
    """A factory of the variables `model` and `batch` of a module; None if it lacks one of them.

    A batch that is a dict is given to forward by keywords, a tuple or list by position, and
    anything else as the one argument. `loss_fn` and `target` are taken where the module has them.
    """
    from torch import nn

    if not isinstance(getattr(module, MODEL, None), nn.Module) or not hasattr(module, BATCH):
        return None

    def factory() -> dict[str, Any]:
        batch = getattr(module, BATCH)
        parts = {name: getattr(module, name) for name in OTHERS if hasattr(module, name)}
        if isinstance(batch, dict):
            return {"model": module.model, "kwargs": batch, **parts}
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        return {"model": module.model, "args": args, **parts}

    return factory


def unseen_text(module: ModuleType, where: str) -> str:
    """What is said of a `model` or `batch` that an import of the file does not make, or ''.

    Parameters
    ----------
    where : the file as a person wrote it.
    """
    parsed = ast.parse(_source(module))
    missing = [name for name in (MODEL, BATCH) if not hasattr(module, name)]
    for statement in parsed.body:
        made = [name for name in missing if name in _assigned(statement)]
        if made and _is_of_scripts(statement):
            return (
                f"{where} makes {' and '.join(made)} under `if __name__ == "
                f'"__main__"` (line {statement.lineno}), which runs only as a script: move what '
                "builds the model and a batch above it"
            )
    if missing == [BATCH]:
        return f"{where} has a `{MODEL}` and no `{BATCH}`"
    return ""


def _is_of_scripts(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)


def _assigned(statement: ast.stmt) -> set[str]:
    return {
        part.id
        for part in _own(statement)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


@dataclass(frozen=True)
class Written:
    """A function as it is written.

    Attributes
    ----------
    gives : whether it returns a value. has_batch : whether that is a model with a batch, or may be
        by what it consists of. trains : whether it, or what it calls in the file, trains.
    is_of_a_model : whether it is named as what makes a model.
    """

    name: str
    gives: bool
    has_batch: bool
    trains: bool
    is_of_a_model: bool

    @property
    def may_build(self) -> bool:
        """Whether to propose it."""
        is_named_otherwise = _OF_TRAINING.match(self.name) is not None and not self.has_batch
        return self.gives and not self.trains and not is_named_otherwise


def written_functions(module: ModuleType) -> dict[str, Written]:
    """The functions of a module, by name and by its text; none if there is no text."""
    found = {
        one.name: one for one in ast.walk(ast.parse(_source(module))) if isinstance(one, Function)
    }
    training = _training(found)
    return {
        name: Written(
            name,
            any(_values(one)),
            any(map(_is_with_batch, _values(one))),
            name in training,
            _OF_A_MODEL.search(name) is not None,
        )
        for name, one in found.items()
    }


def returns_nothing(function: Any) -> bool:
    """Whether a function returns no value, by its text; False where that cannot be told."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    try:
        one = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    found = next((part for part in ast.walk(one) if isinstance(part, ast.FunctionDef)), None)
    if found is None or isinstance(found.body[-1], ast.Raise):
        return False
    is_generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in _own(found))
    return not is_generator and not any(_values(found))


def _source(module: ModuleType) -> str:
    """The text of the file; empty for a module that has none, such as a compiled one."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _own(statement: ast.AST) -> Iterator[ast.AST]:
    """What is written in a statement, but not in the functions and classes inside it."""
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, Function | ast.ClassDef | ast.Lambda):
            yield part
            yield from _own(part)


def _values(function: Function) -> Iterator[ast.expr]:
    """What its own returns return; `return None` returns nothing."""
    for part in _own(function):
        if isinstance(part, ast.Return) and part.value is not None:
            is_none = isinstance(part.value, ast.Constant) and part.value.value is None
            if not is_none:
                yield part.value


def _is_with_batch(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
        return "model" in keys
    return isinstance(value, ast.Tuple) and len(value.elts) in (2, 3)


def _training(functions: Mapping[str, Function]) -> set[str]:
    """The names of functions that train, or call one that does."""
    called = {name: set(_called(one)) for name, one in functions.items()}
    found = {name for name, names in called.items() if names & _TRAINS}
    size = -1
    while size != len(found):
        size = len(found)
        found |= {name for name, names in called.items() if names & found}
    return found


def _called(function: Function) -> Iterator[str]:
    for part in ast.walk(function):
        if isinstance(part, ast.Call):
            called = part.func
            if isinstance(called, ast.Attribute):
                yield called.attr
            elif isinstance(called, ast.Name):
                yield called.id
