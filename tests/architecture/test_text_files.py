"""Text files are read alike everywhere: Windows takes another encoding where none is named."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.import_graph import PACKAGES
from tests.paths import ROOT

TEXT = {"read_text", "write_text"}


def unnamed(source: str) -> list[int]:
    """Lines that open a file of text and name no encoding."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [one.lineno for one in calls if _is_text(one) and not _names_encoding(one)]


def _is_text(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in TEXT
    if not isinstance(call.func, ast.Name) or call.func.id != "open":
        return False
    given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
    return not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in given)


def _names_encoding(call: ast.Call) -> bool:
    return any(keyword.arg == "encoding" for keyword in call.keywords)


@pytest.mark.parametrize("package", PACKAGES)
def test_text_files_are_opened_with_an_encoding(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert unnamed(path.read_text(encoding="utf-8")) == [], path


def test_one_without_is_found() -> None:
    lines = ("open(a)", "open(a, 'rb')", "a.read_text()", "open(a, encoding='utf-8')", "b.open(a)")
    assert unnamed("\n".join(lines)) == [1, 3]
