"""Tables of results on the pages are those of the kept files."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import solver_table
from benchmarks.cells import order_table
from benchmarks.reserved import table as reserved_table
from benchmarks.solvers import Results
from tests.paths import ROOT
from tests.zoo import table as zoo_table

RESULTS = ROOT / "benchmarks" / "results"


def test_solvers() -> None:
    text = solver_table.DOCS.read_text()
    cells = list(json.loads(solver_table.RESULTS.read_text())["cells"].values())
    assert solver_table.written_into(text, cells) == text


def test_orders() -> None:
    text = order_table.DOCS.read_text()
    kept = json.loads(order_table.RESULTS.read_text())
    lines = order_table.size_lines(kept["graphs"], kept["cells"])
    assert solver_table.replaced(text, "orders", lines) == text


def test_reserved(tmp_path: Path) -> None:
    text = reserved_table.DOCS.read_text()
    (tmp_path / "page.md").write_text(text)
    reserved_table.write_tables(Results(RESULTS / "reserved.json"), tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == text


def test_models() -> None:
    text = zoo_table.DOCS.read_text()
    assert zoo_table.written_into(text) == text
    _, rows = zoo_table.kept()
    assert all(row["three steps of training"] == "equal" for row in rows)
    in_parts = [row for row in rows if row["capture"] in zoo_table.IN_PARTS]
    assert text.count("\n| ") > len(in_parts)
