"""What the functions of a file are for, by its text: which build a model, and which train.

A function that is only named by mistake is never called: it may train for an epoch.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
_TRAINS = {"backward", "zero_grad", "fit", "train_step", "train_epoch", "train_one_epoch"}
"""Methods that code which trains calls."""
_OF_TRAINING = re.compile(
    r"^(train|fit|eval|test|valid|main|run|loss|epoch|step|collate|parse|get_args)"
)
_OF_A_MODEL = re.compile(r"model|net(work)?$|module", re.IGNORECASE)


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
        one.name: one for one in ast.walk(ast.parse(source_of(module))) if isinstance(one, Function)
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
    is_generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in own_parts(found))
    return not is_generator and not any(_values(found))


def source_of(module: ModuleType) -> str:
    """The text of the file; empty for a module that has none, such as a compiled one."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def own_parts(statement: ast.AST) -> Iterator[ast.AST]:
    """What is written in a statement, but not in the functions and classes inside it."""
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, Function | ast.ClassDef | ast.Lambda):
            yield part
            yield from own_parts(part)


def _values(function: Function) -> Iterator[ast.expr]:
    """What its own returns return; `return None` returns nothing."""
    for part in own_parts(function):
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
