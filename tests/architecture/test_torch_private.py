"""torch's private parts have one room, so that a release of torch is felt in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.import_graph import sources

ROOM = "remat.graph_capture.torch_private"
"""Not looked for are texts that name a private part, and private attributes of objects."""


def private_parts(source: str) -> list[str]:
    """Each private part of torch that a file imports or reaches from an import, with its line.

    From what the room gives, too: `pytree._private` is as private as `torch._C`.
    """
    tree = ast.parse(source)
    imported = [(node.lineno, *one) for node in ast.walk(tree) for one in _imports(node)]
    paths = {name: path for _, name, path in imported}
    reached = [(node.lineno, path) for node in ast.walk(tree) if (path := _reached(node, paths))]
    found = [*((line, path) for line, _, path in imported), *reached]
    return [f"{line}: {path}" for line, path in sorted(found) if _is_private(path)]


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that a statement binds to parts of torch, each with its path."""
    if isinstance(node, ast.Import):
        for one in node.names:
            if one.name.partition(".")[0] == "torch":
                yield one.asname or "torch", one.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        if node.module.partition(".")[0] == "torch":
            yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)
        elif node.module.startswith(ROOM):
            yield from ((one.asname or one.name, one.name) for one in node.names)


def _reached(node: ast.AST, paths: dict[str, str]) -> str:
    """The path of an attribute, or of `getattr` with a text, of an imported name; else empty."""
    if isinstance(node, ast.Name):
        return paths.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _reached(node.value, paths)
        return base and f"{base}.{node.attr}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        base, name = _reached(node.args[0], paths), node.args[1]
        return f"{base}.{name.value}" if base and isinstance(name, ast.Constant) else ""
    return ""


def _is_private(path: str) -> bool:
    return any(part[0] == "_" and not part.endswith("__") for part in path.split("."))


def test_only_the_room_names_private_parts_of_torch() -> None:
    named = {
        name: found
        for name, path in sources().items()
        if not name.startswith(ROOM)
        if (found := private_parts(path.read_text(encoding="utf-8")))
    }
    assert named == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nimport torch._C", ["2: torch._C"]),
        ("import torch.utils._pytree as tree", ["1: torch.utils._pytree"]),
        ("from torch._ops import OpOverload", ["1: torch._ops.OpOverload"]),
        ("from torch.utils import _pytree", ["1: torch.utils._pytree"]),
        ("import torch\ndef f():\n    torch.cuda._sleep(1)", ["3: torch.cuda._sleep"]),
        ("from torch import nn as n\nn.Module._call_impl", ["2: torch.nn.Module._call_impl"]),
        ("import torch\ngetattr(torch, '_C')", ["2: torch._C"]),
        (f"from {ROOM}.core import pytree\npytree._leaf", ["2: pytree._leaf"]),
        ("import torch\ntorch.__version__\nother._C\n'torch._C'", []),
    ],
)
def test_each_way_to_name_one_is_found(source: str, found: list[str]) -> None:
    assert private_parts(source) == found
