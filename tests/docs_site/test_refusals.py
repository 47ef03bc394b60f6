"""Refusals on the page of sharp edges are those of the code, and the code's own list has all."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import entry_points
from typing import get_args

import pytest

import remat
from docs.generate.refusals import PACKAGES, errors, refusals, refusals_page
from remat.graph_capture import errors as module
from remat.graph_capture.tracing.recipe import Split
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
TABLE = re.compile(r"^\| the error \|.*?\n\n", re.MULTILINE | re.DOTALL)
QUOTES = [
    quote
    for table in TABLE.findall(PAGE)
    for line in table.splitlines()[2:]
    for quote in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]
RAISED = re.compile(r"raise (\w+)\(")


@pytest.mark.parametrize("quote", QUOTES)
def test_what_the_page_quotes_is_what_the_code_says(quote: str) -> None:
    assert any(quote in refusal.text for refusal in refusals())


def test_the_page_quotes_each_way_to_be_refused() -> None:
    assert len(QUOTES) > 25
    assert len(set(QUOTES)) == len(QUOTES)


def test_every_class_of_errors_is_known() -> None:
    public = {name for name, value in vars(module).items() if _is_error(value)}
    assert public <= errors().keys()


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, module.RematError)


def test_all_files_that_refuse_are_on_the_list() -> None:
    listed = {refusal.path for refusal in refusals()}
    raising = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if set(RAISED.findall(path.read_text(encoding="utf-8"))) & errors().keys()
    }
    assert raising - listed == set()


def test_texts_from_tables_and_functions_are_found() -> None:
    told = {refusal.text for refusal in refusals() if refusal.error == "CaptureError"}
    assert any(
        t.startswith("make the distribution") and "looks at the values of a tensor (…)" in t
        for t in told
    )
    assert any(t.startswith("compute it with torch, or outside forward") for t in told)
    assert any("nn.LSTM on CPU runs as one oneDNN op" in t for t in told)


def test_the_list_has_each_refusal_by_its_class() -> None:
    page = refusals_page()
    assert page.startswith("# Every refusal\n")
    classes = {refusal.error for refusal in refusals()}
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [e for e in errors() if e in classes]
    assert page.count("\n- ") == len(refusals())


def test_what_changes_bits_is_asked_for_by_options_that_there_are() -> None:
    table = PAGE.partition("| asked for by | then |")[2].partition("\n\n")[0]
    named = re.findall(r'^\| `(\w+)="?(\w+)"?` \|', table, re.MULTILINE)
    assert named == [("split", "tolerance"), ("compile", "True"), ("backend", "remat")]
    taken = inspect.signature(remat.rematerialize).parameters
    assert {"split", "compile"} <= set(taken)
    assert set(get_args(Split)) == {"none", "exact", "tolerance"}
    assert "remat" in {entry.name for entry in entry_points(group="torch_dynamo_backends")}
