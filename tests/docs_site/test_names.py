"""What the pages name is there: files, folders, modules and what they define."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
from pathlib import Path

import pytest

import remat
from tests.architecture.import_graph import PACKAGES, sources
from tests.paths import ROOT

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md",
]  # fmt: skip
TOPS = (*PACKAGES, "benchmarks", "docs", "examples", "notebooks", "tests")
PATH = re.compile(rf"(?<![\w/.])(?:\.\./)*((?:{'|'.join(TOPS)})/[\w./-]*[\w/])(?![-*\w])")
SCRIPT = re.compile(r"python -m ((?:benchmarks|tests)[.\w]*\w)")
NAME = re.compile(r"(?<![\w/.\"'])remat((?:\.[A-Za-z_]\w*)+)")
DEFINED = re.compile(r"`([A-Za-z_.]+)` (?:in |\()`([\w/]+\.py)`")
OUTPUT = re.compile(r"^```text\n.*?^```$|--out \S+", re.MULTILINE | re.DOTALL)
"""What a command printed, which names ops such as `remat.dropout`, and files that it will write."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = OUTPUT.sub("", page.read_text(encoding="utf-8"))
    missing = [path for path in PATH.findall(text) if not (_is_any(path) or (ROOT / path).exists())]
    missing += [name for name in SCRIPT.findall(text) if not _is_script(name)]
    missing += [f"remat{name}" for name in NAME.findall(text) if not _is_defined(f"remat{name}")]
    assert missing == []


def test_tables_of_what_has_moved_name_what_is_there() -> None:
    files, names = (
        [line.split(",") for line in (ROOT / "docs" / "moved" / name).read_text().splitlines()[1:]]
        for name in ("files.csv", "names.csv")
    )
    missing = [now for _, now in files if not (ROOT / now).is_file()]
    for _, now, file in names:
        last = now.rpartition(".")[2]
        is_there = (ROOT / file).is_file() and re.search(rf"\b{last}\b", (ROOT / file).read_text())
        missing += [] if is_there else [f"{now} in {file}"]
    assert missing == []


def test_every_folder_of_the_packages_is_in_the_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE)
    folders = {str(path.parent.relative_to(ROOT)) for path in sources().values()}
    assert sorted(listed) == sorted(folders)


def test_what_the_architecture_names_is_defined_in_the_file_that_it_names() -> None:
    text = " ".join((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    found = DEFINED.findall(text)
    assert len(found) > 30
    defined = {path: _defined_in(ROOT / path) for _, path in found}
    assert [pair for pair in found if pair[0].split(".")[-1] not in defined[pair[1]]] == []


@pytest.mark.parametrize("name", remat.__all__)
def test_public_names_and_their_methods_are_documented(name: str) -> None:
    public = getattr(remat, name)
    members = vars(public) if isinstance(public, type) else {}
    described = {key: member for key, member in members.items() if _is_method(key, member)}
    missing = [key for key, member in described.items() if not inspect.getdoc(member)]
    assert public.__doc__
    assert missing == []


@pytest.mark.parametrize("name", remat.__all__)
def test_errors_that_a_public_name_says_it_raises_are_public(name: str) -> None:
    public = getattr(remat, name)
    members = vars(public) if isinstance(public, type) else {}
    texts = [inspect.getdoc(one) for one in (public, *members.values()) if not isinstance(one, str)]
    named = set(re.findall(r"\b[A-Z]\w+Error\b", " ".join(filter(None, texts))))
    if isinstance(public, type) and issubclass(public, Exception):
        return  # its own text
    assert {one for one in named if not hasattr(builtins, one)} <= set(remat.__all__)


def _is_method(name: str, member: object) -> bool:
    kinds = (property, functools.cached_property, classmethod, staticmethod)
    return not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))


def _is_any(path: str) -> bool:
    """Whether it stands for a file of the reader's, as `solver/FAMILY/NAME.py` does."""
    return "NAME" in path or "FAMILY" in path


def _is_script(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def _is_defined(name: str) -> bool:
    """Whether the module has it, or says where it is from; what is in a class is not looked at."""
    modules = sources()
    module, *inside = next(
        [name[:at], *filter(None, name[at + 1 :].split(".")[:1])]
        for at in [len(name), *(i for i in reversed(range(len(name))) if name[i] == ".")]
        if name[:at] in modules
    )
    if not inside:
        return True
    if module == "remat":
        return inside[0] in remat.__all__
    return inside[0] in _defined_in(modules[module])


def _defined_in(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found
