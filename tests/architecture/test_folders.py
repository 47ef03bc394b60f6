"""The house: folders of a size to be read, one word a thing, and all of them installed."""

from __future__ import annotations

import ast
import re
import subprocess
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.import_graph import PACKAGES, sources
from tests.paths import ROOT

BETWEEN_TESTS = re.compile(r"\W*(from|import) tests\.(\w+\.)*test_")
MOST_FILES = 20
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
MOST_AT_THE_TOP = {
    "solver": 18, "graph_capture": 8, "rewriter": 6, "remat": 14, "schedules": 20,
}  # fmt: skip


def folders() -> list[Path]:
    return sorted({path.parent for path in sources().values()})


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_has_a_line_on_what_it_owns_and_few_files(folder: Path) -> None:
    header = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert header
    assert header.partition("\n")[0].endswith((".", "?"))
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


@pytest.mark.parametrize("root", ["benchmarks", "docs", "examples", "notebooks", "tests"])
def test_folders_beside_the_packages_have_few_files_too(root: str) -> None:
    counts: Counter[Path] = Counter(
        path.parent
        for path in (ROOT / root).rglob("*")
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(ROOT).parts[:-1])
    )
    assert counts
    assert {folder: n for folder, n in counts.items() if n > MOST_FILES} == {}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_the_repository_holds_the_house_alone() -> None:
    asked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {name.partition("/")[0] for name in asked.stdout.splitlines() if "/" in name}
    assert found == {*PACKAGES, ".ci", "benchmarks", "docs", "examples", "notebooks", "tests"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_top_of_a_package_has_few_files(package: str) -> None:
    files = [path for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST_AT_THE_TOP[package]


def test_the_judge_is_short() -> None:
    """Lines of code: neither empty, nor comments, nor docstrings, nor imports."""
    path = ROOT / "schedules/simulate.py"
    imports = {
        line
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    assert 100 < len(code_lines(path) - imports) <= 267


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines with a token that runs."""
    tree = ast.parse(path.read_text())
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = {
        line
        for text in texts
        if isinstance(text, ast.Constant)
        for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)
    }
    with path.open("rb") as file:
        tokens = [one for one in tokenize.tokenize(file.readline) if one.type not in SILENT]
    lines = {n for one in tokens for n in range(one.start[0], one.end[0] + 1)}
    return lines - docstrings


def test_every_folder_is_installed() -> None:
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name for name, path in sources().items() if path.name == "__init__.py"}
    assert set(manifest["packages"]) == packages


def test_no_test_file_imports_from_another() -> None:
    """What several need stands in a file of its own, which is no test."""
    lines = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text().splitlines()
        if BETWEEN_TESTS.match(line)
    ]
    assert lines == []
