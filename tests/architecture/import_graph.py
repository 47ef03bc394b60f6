"""Who imports whom, read from the sources: also late, and for annotations alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]
PACKAGES = ("remat", "graph_capture", "solver", "schedules", "rewriter")


@dataclass(frozen=True)
class Arrow:
    """An import of a module by another; `is_annotation`: under ``if TYPE_CHECKING``."""

    importer: str
    imported: str
    is_annotation: bool


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Each module of the packages by its import name, with its file."""
    return {
        _import_name(path.relative_to(root)): path
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def arrows(root: Path = ROOT) -> list[Arrow]:
    """All imports, of the packages' own modules and of others, in the order of the files."""
    found = sources(root)
    return [arrow for name, path in found.items() for arrow in _arrows_of(name, path, found)]


def circles(found: list[Arrow], *, with_annotations: bool = False) -> set[frozenset[str]]:
    """Sets of modules that import each other, one by way of another.

    Parameters
    ----------
    with_annotations : also count what is imported for annotations alone.
    """
    known = {arrow.importer for arrow in found}
    graph = nx.DiGraph(
        (arrow.importer, arrow.imported)
        for arrow in found
        if arrow.imported in known and (with_annotations or not arrow.is_annotation)
    )
    return {frozenset(part) for part in nx.strongly_connected_components(graph) if len(part) > 1}


def _arrows_of(importer: str, path: Path, known: dict[str, Path]) -> Iterator[Arrow]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_annotations = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        for imported in _imported(node, known):
            yield Arrow(importer, imported, node in for_annotations)


def _imported(node: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Modules that a statement imports; ``from package import module`` names the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None, "imports are absolute"
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in known else node.module


def _import_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "remat" else ("remat", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
