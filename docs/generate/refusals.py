"""The page of all refusals, read from the code: `python -m docs.generate.refusals` prints it.

Each error that the packages raise on purpose is a class of `graph_capture/errors.py`, and its text
stands where it is raised, or in a function or a table that is asked there. What a text is filled
with at run time is shown as `…`. The page is made when the site is built, so it follows the code.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("graph_capture", "solver", "schedules", "rewriter", "remat")
BASE = "RematError"
FILLED = "…"
LEAST_WORDS = 3
"""A text of fewer is one that comes from elsewhere."""

MOST_FILES = 2
"""A name that more files give to a function of theirs stands for none of them elsewhere."""

_HEAD = """# Every refusal

Every error text in the code, by the class of the error; `…` stands for what is filled in at run
time. [Limits](limits.md) says what to do about those that most people meet.
"""

Function = ast.FunctionDef | ast.Module
Bound = dict[str, list[ast.expr]]
"""What a name may stand for: what it is given, or what the function of that name returns."""


class Refusal(NamedTuple):
    """An error, its text, and the file that raises it."""

    error: str
    text: str
    path: str


def errors() -> dict[str, str]:
    """Each class of errors that is raised on purpose, with the first line of its docstring."""
    found = {BASE: ""}
    classes = [node for _, tree in _trees() for node in tree.body if isinstance(node, ast.ClassDef)]
    while True:
        more = {
            node.name: (ast.get_docstring(node) or "").partition("\n\n")[0]
            for node in classes
            if node.name not in found and {ast.unparse(base) for base in node.bases} & found.keys()
        }
        if not more:
            return found
        found |= more


@functools.cache
def refusals() -> tuple[Refusal, ...]:
    """All of them, in the order of the files."""
    known, answers = errors(), _answers()
    found: dict[Refusal, None] = {}
    for path, tree in _trees():
        for function, call in _calls(tree):
            name = _name(call)
            if name not in known or not call.args:
                continue
            for text in _texts(call.args[0], answers[path] | _assigned(function)):
                if len(text.replace(FILLED, " ").split()) >= LEAST_WORDS:
                    found[Refusal(name, text, path)] = None
    return tuple(found)


@functools.cache
def _trees() -> tuple[tuple[str, ast.Module], ...]:
    files = (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))
    return tuple(
        (str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in files
    )


def _calls(tree: ast.Module) -> Iterator[tuple[Function, ast.Call]]:
    """Each call, with the innermost function around it."""

    def within(node: ast.AST, function: Function) -> Iterator[tuple[Function, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            yield from within(child, child if isinstance(child, ast.FunctionDef) else function)

    return within(tree, tree)


def _answers() -> dict[str, Bound]:
    """By file, what its functions return, and those of other files, unless many have the name."""
    own = {path: _returned(tree) for path, tree in _trees()}
    files = Counter(name for found in own.values() for name in found)
    others: Bound = {}
    for found in own.values():
        for name, returned in found.items():
            if files[name] <= MOST_FILES:
                others.setdefault(name, []).extend(returned)
    return {path: others | found for path, found in own.items()}


def _returned(tree: ast.Module) -> Bound:
    """What functions of a file return, and the texts of tables that they look into."""
    tables = {
        ast.unparse(node.targets[0]): node.value.values
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    found: Bound = {}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        returned = found.setdefault(function.name, [])
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                returned.append(node.value)
            elif isinstance(node, ast.Name):
                texts = tables.get(node.id, [])
                returned += [one for one in texts if isinstance(one, ast.Constant)]
    return found


def _assigned(function: Function) -> Bound:
    """Names that a function gives to what may be a text."""
    found: Bound = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            found.setdefault(f":={node.target.id}", []).append(node.value)
    return found


def _texts(node: ast.expr, known: Bound, seen: frozenset[str] = frozenset()) -> list[str]:
    """What an expression may say: one text, or one for each that a name in it stands for."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr | ast.BinOp):
        joined = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
        parts = [_texts(part, known, seen) or [FILLED] for part in joined]
        return ["".join(one) for one in itertools.product(*parts)]
    if isinstance(node, ast.FormattedValue):  # only what was looked up is a text of ours
        return _named([f":={_name(node.value)}"], known, seen)
    return _named([_name(node), f":={_name(node)}"], known, seen)


def _named(names: list[str], known: Bound, seen: frozenset[str]) -> list[str]:
    """The texts that names stand for; none for those that are not known, or lead to themselves."""
    values = [value for name in names if name not in seen for value in known.get(name, [])]
    within = seen.union(names)
    texts = (text for one in values for text in _texts(one, known, within))
    return list(dict.fromkeys(filter(None, texts)))


def _name(node: ast.expr) -> str:
    """Of a name, of what is called, or of an attribute."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def refusals_page() -> str:
    """The page in Markdown."""
    parts = [_HEAD]
    for error, meaning in errors().items():
        rows = [one for one in refusals() if one.error == error]
        if rows:
            lines = [f"- {_escaped(one.text)} (`{one.path}`)" for one in rows]
            parts.append("\n\n".join([f"## {error}", meaning, "\n".join(lines)]))
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Markdown's own signs, as they are."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", " ".join(text.split()))


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs when it knows the pages that are written by hand."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "refusals.md", content=refusals_page()))
    return files


if __name__ == "__main__":
    import sys

    sys.stdout.write(refusals_page())
