"""Why a file gives no model and batch, though a person has written them: where its names are made.

A name that is made under ``if __name__ == "__main__"`` or in a function is none of the module's
when the file is imported. The text of the file says so, and where.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from remat.job.user_file.plain_file import BATCH, MODEL


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


def give_something(module: ModuleType) -> set[str]:
    """The names of the functions that return a value, by the text of the file."""
    return {
        one.name
        for one in ast.walk(ast.parse(_source(module)))
        if isinstance(one, ast.FunctionDef)
        and any(isinstance(part, ast.Return) and part.value is not None for part in _own(one))
    }


def _source(module: ModuleType) -> str:
    """The text of the file; empty for a module that has none, such as a compiled one."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _is_of_scripts(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)


def _assigned(statement: ast.stmt) -> set[str]:
    return {
        part.id
        for part in _own(statement)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _own(statement: ast.AST) -> Iterator[ast.AST]:
    """What is written in a statement, but not in the functions and classes inside it."""
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield part
            yield from _own(part)
