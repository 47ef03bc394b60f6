"""What a notebook shows of graphs, schedules, results and fronts."""

from __future__ import annotations

from html.parser import HTMLParser

import msgspec

from remat.analysis.compare import sweep
from remat.formats import bytes_text
from remat.solver import solve_within
from tests.limits import AMPLE_S
from tests.schedules.conftest import Planned


class Balanced(HTMLParser):
    """Fails where an element is closed that was not opened last; keeps the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def shown(thing: object) -> list[str]:
    return Balanced(thing._repr_html_()).said  # type: ignore[attr-defined]


def test_each_shows_its_figures(planned: Planned) -> None:
    graph, result = planned
    assert f"TrainingGraph: {graph.name}" in shown(graph)
    assert bytes_text(graph.resident.total_bytes) in shown(graph)
    assert bytes_text(result.peak_bytes) in shown(result)
    assert bytes_text(result.budget_bytes) in shown(planned.schedule)
    lost = solve_within(graph, 1000, "chen_sqrt")
    assert bytes_text(lost.least_feasible_bytes) in shown(lost)
    front = sweep(graph, ["70%", 1000], ["chen_sqrt"], time_limit_s=AMPLE_S).fronts["chen_sqrt"]
    rows = shown(front)
    assert "none found" in rows
    assert bytes_text(front.points[1].result.peak_bytes) in rows


def test_names_are_text_there_too(planned: Planned) -> None:
    graph = msgspec.structs.replace(planned.graph, name="<b>A&B</b>")
    assert "TrainingGraph: <b>A&B</b>" in shown(graph)
