"""Names: each is defined once, and public only if another file reads it."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.architecture.import_graph import PACKAGES, sources
from tests.paths import ROOT

READERS = ("benchmarks", "docs", "examples", "notebooks", "tests")
TEXTS = (".md", ".py", ".sh")
MOST_FOLDERS = 2
_WORD, _CODE = re.compile(r"[A-Za-z_]\w*"), re.compile(r"`[^`]*`")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_is_defined_in_one_file_of_a_package(package: str) -> None:
    """Private ones too; but two files may have the same private constant."""
    files = {path: _defined(path, constants=False) for path in (ROOT / package).rglob("*.py")}
    assert _with_several(files) == {}


def test_a_public_name_is_defined_in_one_folder() -> None:
    found = defined_in_two_folders(sources().values())
    assert found == {}, "define it once and import it, or make it private"


def test_few_files_have_the_same_name() -> None:
    folders = Counter(path.name for path in sources().values() if path.stem != "__init__")
    assert [name for name, n in folders.items() if n > MOST_FOLDERS] == []


def test_a_name_that_no_other_file_reads_is_private() -> None:
    found = read_by_none(sources().values(), [*sources().values(), *readers()])
    assert found == [], "begin it with an underscore, or delete it"


def test_what_breaks_the_rules_is_found(tmp_path: Path) -> None:
    texts = {
        "a/one.py": "SHARED = 1\ndef read(): return SHARED\nclass Unread: pass\n_PRIVATE = 1\n",
        "b/two.py": "import read\nSHARED, x.unread = 2, read\n_PRIVATE = 1\n'Unread in a text.'\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in texts]
    assert defined_in_two_folders(files) == {"SHARED": [str(path) for path in files]}
    assert read_by_none(files, files) == [f"{files[0]}: Unread"]


def defined_in_two_folders(files: Iterable[Path]) -> dict[str, list[str]]:
    """Public names that files of several folders define, with these files."""
    twice = _with_several({path: _public(path) for path in files})
    return {k: found for k, found in twice.items() if len({Path(one).parent for one in found}) > 1}


def read_by_none(files: Iterable[Path], readers: list[Path]) -> list[str]:
    """Public names of files that no other file of `readers` reads, as ``file: name``."""
    words = {path: _words(path) for path in readers}
    times = Counter(word for found in words.values() for word in found)
    return [
        f"{path}: {name}"
        for path in files
        for name in sorted(_public(path))
        if times[name] == (name in words[path])
    ]


def readers() -> list[Path]:
    """All files beside the code of the packages that could name what is in it."""
    found = [path for root in READERS for path in (ROOT / root).rglob("*") if path.suffix in TEXTS]
    tables = (path for root in PACKAGES for path in (ROOT / root).glob("**/*.json"))
    return [*found, *tables, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]


def _with_several(names: dict[Path, set[str]]) -> dict[str, list[str]]:
    """Names that several files have, with these files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, found in sorted(names.items()):
        for name in found:
            places[name].append(str(path))
    return {name: found for name, found in places.items() if len(found) > 1}


def _public(path: Path) -> set[str]:
    return {name for name in _defined(path) if not name.startswith("_")}


def _defined(path: Path, *, constants: bool = True) -> set[str]:
    """Functions and classes of the top level, and constants; not ``__getattr__`` and the like."""
    names = {name for node in _tree(path).body for name in _defined_by(node, constants)}
    return {name for name in names if not name.startswith("__")}


def _defined_by(node: ast.stmt, constants: bool) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif constants and isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for one in (inner for target in targets for inner in ast.walk(target)):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                yield one.id


def _words(path: Path) -> set[str]:
    """Names in a file; of Python those in code, in its texts, and marked as code in docstrings."""
    if path.suffix != ".py":
        return set(_WORD.findall(path.read_text(encoding="utf-8")))
    nodes = list(ast.walk(_tree(path)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {word for node in nodes for word in _words_of(node, id(node) in docstrings)}


def _words_of(node: ast.AST, is_docstring: bool) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield node.name.rpartition(".")[2]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        marked = _CODE.findall(node.value) if is_docstring else [node.value]
        yield from (word for text in marked for word in _WORD.findall(text))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
