"""The notebooks that are kept with what they showed are those of the text, and of this release."""

from __future__ import annotations

import ast
import copy
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from docs.generate.notebook_files import normalised
from tests.paths import ROOT

TEXTS = sorted((ROOT / "notebooks").glob("*.py"))
MARKER = re.compile(r"^# %%( \[markdown\])?$\n?", re.MULTILINE)
HEADER = re.compile(r"\A# ---\n.*?^# ---\n", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r" at 0x[0-9a-f]{6}|/tmp/|/home/|/root/|ipykernel")
"""What another run, or another machine, would have otherwise."""
MOST_BYTES = 300_000
OF_PICTURES = "subplots"

pytestmark = pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)


def kept(text: Path) -> dict[str, Any]:
    return json.loads(text.with_suffix(".ipynb").read_text(encoding="utf-8"))


def code_cells(text: Path) -> list[dict[str, Any]]:
    return [cell for cell in kept(text)["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def cells_of(text: Path) -> list[tuple[str, str]]:
    """Kind and source of each cell of a text in percent format."""
    before, *parts = MARKER.split(HEADER.sub("", text.read_text(encoding="utf-8")))
    assert not before.strip()
    cells: list[tuple[str, str]] = []
    for marked, body in zip(parts[::2], parts[1::2], strict=True):
        if marked:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().split("\n")]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip("\n")))
    return cells


def shows(code: str) -> bool:
    """Whether a cell prints, or ends with an expression."""
    tree = ast.parse(code)
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    prints = any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        for statement in outside
        for node in ast.walk(statement)
    )
    return prints or isinstance(tree.body[-1], ast.Expr)


def test_its_cells_are_those_of_the_text(text: Path) -> None:
    assert [(cell["cell_type"], source(cell)) for cell in kept(text)["cells"]] == cells_of(text)


def test_no_cell_has_an_error_and_those_that_print_have_outputs(text: Path) -> None:
    for number, cell in enumerate(code_cells(text), start=1):
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert cell["execution_count"] == number
        assert "error" not in kinds
        assert kinds or not shows(source(cell)), source(cell)
        if OF_PICTURES in source(cell):
            assert any("image/png" in output.get("data", {}) for output in cell["outputs"])


def test_it_is_of_a_run_of_this_release_and_of_no_machine(text: Path) -> None:
    assert kept(text)["metadata"]["remat"]["version"] == version("remat")
    shown = json.dumps([cell["outputs"] for cell in code_cells(text)])
    assert ELSEWHERE.findall(shown) == []
    assert text.with_suffix(".ipynb").stat().st_size <= MOST_BYTES


def test_a_second_run_would_differ_in_figures_alone(text: Path) -> None:
    once = kept(text)
    again = copy.deepcopy(once)
    again["metadata"] |= {"widgets": {"state": {"66a6f": 1}}, "language_info": {"version": "3.12"}}
    for number, cell in enumerate(again["cells"]):
        cell |= {"id": f"{number}b1baf", "metadata": {"execution": {"iopub.status.busy": number}}}
        if cell["cell_type"] == "code":
            cell |= {"execution_count": 7, "outputs": in_parts(cell["outputs"])}
    assert normalised(again) | {"metadata": once["metadata"]} == once
    assert normalised(again)["metadata"].keys() == once["metadata"].keys()


def in_parts(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Streams line by line, as a kernel may send them, and an empty result."""
    parts: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] == "stream":
            parts += [{**output, "text": line} for line in output["text"]]
        else:
            parts.append(output)
    nothing = {"output_type": "execute_result", "execution_count": 7, "metadata": {}}
    return [*parts, {**nothing, "data": {"text/plain": ""}}]
