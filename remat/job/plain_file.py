"""A file without a factory, in which a model and its batch are variables.

A name that is made under ``if __name__ == "__main__"`` or in a function is none of the module's
when the file is imported. The text of the file says so, and where.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import ModuleType
from typing import Any

from remat.job.by_text import own_parts, source_of

MODEL, BATCH = "model", "batch"
OTHERS = ("loss_fn", "target")


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
    parsed = ast.parse(source_of(module))
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
        for part in own_parts(statement)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
