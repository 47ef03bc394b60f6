"""The table of families: both forms of graphs are read, and each row says what was known when."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.families import read_graph, rows_of
from tests.solver.graphs.random_graphs import chain

NODES = {
    "nodes": [{"id": i, "cost": 1 + i, "bytes": 10} for i in range(4)],
    "edges": [[0, 1], [1, 2], [0, 3], [2, 3]],
    "outputs": [1, 3],
}


def test_outputs_of_an_instance_live_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(json.dumps(NODES))
    graph = read_graph(path)
    assert graph.outputs == ("n1", "n3")
    path.write_bytes(chain(3).to_json())
    assert read_graph(path).hash == chain(3).hash


def test_a_row_has_the_gap_to_the_best_bound_of_all() -> None:
    rows = list(rows_of("chain", chain(6), ["0.7"], ["auto", "msps"], (20.0, 40.0)))
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[3] for row in cells] == ["auto", "msps"]
    assert cells[0][4] == cells[0][5]
    assert "gap" in cells[1][4]
    (best,) = {row[4].split(",")[0] for row in cells[:1]}
    assert float(best.split()[0]) > 0


def test_a_row_of_the_least_peak_says_how_far_it_is_above_its_bound() -> None:
    (row,) = rows_of("chain", chain(6), ["least"], ["auto"], (20.0,))
    share, above = (row.split("|")[at].split("%")[0] for at in (3, 5))
    assert 0 < float(share) < 100
    assert 0 <= float(above) < 50
