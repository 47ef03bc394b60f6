"""The tree of a batch in a plan file, read without running code that the file names.

torch reads such a tree by `treespec_loads`. That imports the module of an enum or of a factory of
default values by the name that the text gives, and so would run whatever the file wants. Here only
modules that are imported already are allowed, and of them only enums and built-in types.
"""

from __future__ import annotations

import builtins
import collections
import enum
import sys
from collections.abc import Iterator
from typing import Any

import torch.utils._pytree as pytree

from remat.graph_capture.errors import PlanError, TextError
from remat.graph_capture.files.json_text import decoded

ENUM = "__enum__"
FACTORY = "default_factory_module", "default_factory_name"


def tree_from(text: str) -> pytree.TreeSpec:
    """The tree that `treespec_dumps` wrote.

    Raises
    ------
    PlanError : it names code that is not of the containers of a batch.
    ValueError, TypeError, KeyError, AttributeError, AssertionError, RuntimeError : it is no tree.
    """
    for found in _objects(_json_in(text)):
        if ENUM in found:
            _check_enum(str(found.get("fqn")))
        if not found.keys().isdisjoint(FACTORY):
            _check_factory(*(str(found.get(key)) for key in FACTORY))
    return pytree.treespec_loads(text)


def _json_in(text: str) -> object:
    try:
        return decoded(text, object)
    except TextError as error:
        raise PlanError(f"the batch in the plan file cannot be read ({error})") from error


def _objects(root: object) -> Iterator[dict[str, Any]]:
    """All JSON objects in a tree, those in its texts included: contexts are JSON in JSON."""
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
            context = one.get("context")
            if isinstance(context, str) and ("{" in context or "\\" in context):
                waiting.append(_json_in(context))
        elif isinstance(one, list):
            waiting += one


def _check_enum(place: str) -> None:
    """Raise `PlanError` unless ``module:Class`` is an enum that is here already."""
    module, _, path = place.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr: a module may import another when it is asked for a name.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise PlanError(
            f"the batch in the plan file names {place!r}, which is no enum that is imported here: "
            "import its module before the plan is loaded, if you know it"
        )


def _check_factory(module: str, name: str) -> None:
    """Raise `PlanError` unless a factory of default values is a type of Python's own."""
    here: dict[str, object] = {"builtins": builtins, "collections": collections}
    if not isinstance(getattr(here.get(module), name, None), type):
        raise PlanError(
            f"the batch in the plan file makes default values by {module}.{name}, which is no type "
            "of Python's own: pass that part of the batch as a dict"
        )
