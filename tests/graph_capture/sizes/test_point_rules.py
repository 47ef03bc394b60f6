"""Points of a range that no measuring gives, as in a file that was edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from remat.graph_capture.errors import GraphError
from remat.graph_capture.sizes.range_costs import CostPoint, WorkspacePoint
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from tests.ranged_graphs import chain

Edit = Callable[[Any], Any]


def measured() -> RangedGraph:
    graph = chain("64*n", layers=2)
    n = len(graph.base.ops)
    (symbol,) = graph.symbols

    def point(size: int) -> CostPoint:
        figures = (1.0,) * n, (8 * size,) * n, (2,) * n
        return CostPoint({symbol.name: size}, *figures, origins=("measured",) * n)

    points = (point(symbol.low), point(symbol.middle), point(symbol.high))
    more = (WorkspacePoint({symbol.name: symbol.low + 1}, (64,) * n),)
    return msgspec.structs.replace(graph, points=points, workspaces=more)


def test_what_was_measured_is_read_back() -> None:
    graph = measured()
    assert RangedGraph.from_json(graph.to_json()) == graph
    assert graph.at(n=graph.symbols[0].low + 1).ops[0].workspace_bytes == 64


EDITS: dict[str, tuple[str, Edit]] = {
    "fewer": ("there are figures of", lambda d: d["workspaces"][0]["workspace_bytes"].pop()),
    "fewer costs": ("there are figures of", lambda d: d["points"][1]["cost_us"].pop()),
    "fewer origins": ("there are figures of", lambda d: d["points"][1]["origins"].pop()),
    "negative": (
        "is negative or too large",
        lambda d: d["workspaces"][0]["workspace_bytes"].__setitem__(0, -1),
    ),
    "huge": (
        "is negative or too large",
        lambda d: d["points"][0]["workspace_bytes"].__setitem__(0, 10**25),
    ),
    "bytes kept": (
        "are negative or too large",
        lambda d: d["points"][0].__setitem__("extra_bytes", {"a": 10**25}),
    ),
    "libraries": (
        "are negative or too large",
        lambda d: d["points"][0].__setitem__("libraries_bytes", -2),
    ),
    "other sizes": (
        "sizes that it does not have", lambda d: d["workspaces"][0].__setitem__("sizes", {"m": 3})
    ),
    "no top": ("were timed only up to", lambda d: d["points"].pop()),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_others_are_refused(name: str) -> None:
    said, edit = EDITS[name]
    data = json.loads(measured().to_json())
    edit(data)
    with pytest.raises(GraphError, match=said):
        RangedGraph.from_json(json.dumps(data))
