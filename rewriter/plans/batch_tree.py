"""The tree of a batch in a plan file, read as data: nothing is imported because a file names it.

torch's `treespec_loads` imports what the text names, and so would run whatever the file wants.
Taken are Python's containers, those registered already, and enums of imported modules.
"""

from __future__ import annotations

import builtins
import collections
import enum
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from remat.graph_capture.errors import PlanError, TextError
from remat.graph_capture.files import decode_json
from remat.graph_capture.torch_private.core import pytree

_PROTOCOL = 1
_MOST_DEPTH = 100  # containers within containers: torch takes such a tree apart by recursion
_ENUM = "__enum__"


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    """A container as torch writes it; a leaf has neither type nor context."""

    type: str | None
    context: object
    children_spec: list[_Node]


class _Factory(msgspec.Struct, forbid_unknown_fields=True):
    default_factory_module: str
    default_factory_name: str
    dict_context: list[object]


def tree_from(text: str) -> pytree.TreeSpec:
    """The tree that `treespec_dumps` wrote; a type's own error if it refuses its context."""
    protocol, root = _decoded(text, tuple[int, _Node])
    if protocol != _PROTOCOL:
        raise _unread(f"its tree has protocol {protocol}, and this release reads {_PROTOCOL}")
    return _spec(root, 0)


def _unread(why: object) -> PlanError:
    return PlanError(f"cannot read the batch in the plan file: {why}")


def _decoded(text: str, kind: Any) -> Any:
    try:
        return decode_json(text, kind)
    except TextError as error:
        raise _unread(error) from error


def _spec(node: _Node, depth: int) -> pytree.TreeSpec:
    if depth > _MOST_DEPTH:
        raise _unread(f"it nests more than {_MOST_DEPTH} containers")
    if node.type is None:
        if node.context is not None or node.children_spec:
            raise _unread("a leaf of its tree has parts")
        return pytree.tree_structure(0)  # any leaf will do: a tree holds no values
    children = [_spec(child, depth + 1) for child in node.children_spec]
    if node.type in _OWN:
        kind, context_of = _OWN[node.type]
        return pytree.TreeSpec(kind, context_of(node.context, len(children)), children)
    kind = _registered(node.type)
    read = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    context: Any = read(node.context) if read is not None else _json_context(node.context)
    return pytree.TreeSpec(kind, context, children)


def _registered(name: str) -> type[Any]:
    found: object = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    # All types that were registered without a name stand under the same one.
    if name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND or not isinstance(found, type):
        raise _unread(
            f"import the module of container {name!r} before loading the plan, if you know it: "
            "nothing here registers it"
        )
    return found


def _json_context(context: object) -> Any:
    if not isinstance(context, str):
        raise _unread("the context of a container is not text")
    return _with_enums(_decoded(context, object))  # JSON within the JSON


def _with_enums(one: Any) -> Any:
    if isinstance(one, list):
        return [_with_enums(part) for part in one]
    if not isinstance(one, dict):
        return one
    if _ENUM in one:
        return _enum_member(str(one.get("fqn")), one.get("name"))
    return {key: _with_enums(part) for key, part in one.items()}


def _enum_member(place: str, name: object) -> enum.Enum:
    module, _, path = place.partition(":")
    found: object = sys.modules.get(module)  # not import: a file must not choose what code runs
    for part in path.split("."):
        # Not getattr: a module may import another when it is asked for a name.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise _unread(
            f"import the module of {place!r} before loading the plan, if you know it: it is no "
            "enum imported here"
        )
    if name not in found.__members__:
        raise _unread(f"it names {name!r}, which is not a member of {place!r}")
    return found.__members__[str(name)]


def _nothing(context: object, n_children: int) -> None:
    if _json_context(context) is not None:
        raise _unread("a tuple or list of its tree has a context")


def _keys(context: object, n_children: int) -> list[Any]:
    return _as_keys(_json_context(context), n_children)


def _as_keys(found: Any, n_children: int) -> list[Any]:
    if not isinstance(found, list) or any(isinstance(key, (list, dict)) for key in found):
        raise _unread("a dict of its tree has invalid keys")
    if len(found) != n_children or len(set(found)) != n_children:
        raise _unread("keys and values of a dict of its tree do not match")
    return found


def _length(context: object, n_children: int) -> int | None:
    found = _json_context(context)
    # Not isinstance: True is an int too.
    if found is not None and (type(found) is not int or found < n_children):
        raise _unread("a deque of its tree is longer than its maximum")
    return found


def _factory(context: object, n_children: int) -> list[Any]:
    try:
        given = msgspec.convert(context, _Factory)
    except msgspec.ValidationError as error:
        raise _unread(error) from error
    module, name = given.default_factory_module, given.default_factory_name
    here: dict[str, object] = {"builtins": builtins, "collections": collections}
    made = getattr(here.get(module), name, None)
    if not isinstance(made, type):  # builtins has functions too, such as exec
        raise _unread(
            "pass that part of the batch as a dict: it makes default values with "
            f"{module}.{name}, which is not one of Python's own types"
        )
    return [made, _as_keys(_with_enums(given.dict_context), n_children)]


def _named_tuple(context: object, n_children: int) -> type[Any]:
    kind = _registered(str(context))
    fields = getattr(kind, "_fields", None)
    if not issubclass(kind, tuple) or not isinstance(fields, tuple) or len(fields) != n_children:
        raise _unread(f"it has a {context!r} of {n_children} parts, which is no named tuple here")
    return kind


_OWN: dict[str, tuple[Any, Callable[[object, int], Any]]] = {
    "builtins.tuple": (tuple, _nothing),
    "builtins.list": (list, _nothing),
    "builtins.dict": (dict, _keys),
    "collections.OrderedDict": (OrderedDict, _keys),
    "collections.defaultdict": (defaultdict, _factory),
    "collections.deque": (deque, _length),
    "collections.namedtuple": (collections.namedtuple, _named_tuple),
}
"""Python's own containers, as torch names them, and what reads the context of each."""
