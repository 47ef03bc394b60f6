"""Names of any kind are text in pages, pictures and exports, and nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

import remat
from remat.analysis.plan_report import page_facts, report
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.exports import to_dot
from remat.schedules.report.page import render
from remat.solver import Result, solve_within
from tests.files.hostile import SCRIPT, plan_with_names, with_names
from tests.files.kinds import GRAPH, SOLVER

PLAIN = "plain"


class Tags(HTMLParser):
    """All tags of a page with their attributes, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        pytest.fail(f"a comment begins: {data[:50]}")


def solved(bad: str) -> tuple[TrainingGraph, Result]:
    """A graph and a result, named so."""
    made = plan_with_names(bad)
    assert made.graph is not None
    result = solve_within(made.graph, 1 << 40, SOLVER)
    facts = {"solver": f"a{bad}", "message": bad, "schedule": made.schedule}
    return made.graph, msgspec.structs.replace(result, **facts)


def page_of(bad: str) -> str:
    """A report with a front, named so."""
    graph, result = solved(bad)
    swept = remat.sweep(graph, ["90%"], SOLVER).front
    front = msgspec.structs.replace(swept, solver=bad, name=bad)
    return report(graph, result, fronts={bad: front})


def test_names_add_no_tag_and_no_attribute_to_a_report() -> None:
    page, plain = page_of(SCRIPT), page_of(PLAIN)
    assert Tags(page).found == Tags(plain).found
    assert any(SCRIPT.replace("\u2028", "").strip() in text for text in Tags(page).texts)


def test_names_of_a_file_add_no_tag_to_its_report() -> None:
    """Why no check was run, and the machine, are texts of the file too."""

    def shown(bad: str) -> Tags:
        file = msgspec.structs.replace(plan_with_names(bad), check=None, prediction=None)
        graph, result = solved(bad)
        return Tags(render(page_facts(graph, result, kept=file)))

    assert shown(SCRIPT).found == shown(PLAIN).found
    assert f"{SCRIPT}, torch 2.13.0" in shown(SCRIPT).texts
    # Why it was not run, the note of the result, and that of the graph beside its costs and below.
    assert shown(SCRIPT).texts.count(SCRIPT) == 4


def test_names_come_to_the_script_as_they_are() -> None:
    page = page_of(SCRIPT)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    assert "<" not in found[1]
    data = json.loads(found[1])
    assert data["model"].endswith(SCRIPT)
    for texts in (data["ops"]["name"], data["ops"]["module"]["texts"], data["values"]["name"]):
        assert all(text.endswith(SCRIPT) for text in texts)
    assert list(data["fronts"]) == [SCRIPT]


def test_names_add_no_tag_to_the_tables_of_notebooks() -> None:
    def shown(bad: str) -> list[object]:
        graph, result = solved(bad)
        swept = remat.sweep(graph, ["90%"], SOLVER).front
        front = msgspec.structs.replace(swept, solver=bad, name=bad)
        assert result.schedule is not None
        plan = remat.Plan.from_result(result, step=graph)
        made = (graph, result, result.schedule, front, plan)
        return [Tags(one._repr_html_()).found for one in made]

    assert shown(SCRIPT) == shown(PLAIN)


def test_names_end_no_text_of_graphviz() -> None:
    bad = 'x", color="red\\'
    plain = to_dot(with_names(GRAPH, "x"))
    text = to_dot(with_names(GRAPH, bad))
    # Without its quoted texts, what is left is the same.
    quoted = re.compile(r'"(?:[^"\\]|\\.)*"')
    assert quoted.sub("", text) == quoted.sub("", plain)


@pytest.mark.parametrize("bad", [SCRIPT, "$\\frac{$"])
def test_names_are_drawn_as_they_are(bad: str, tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from remat.schedules import plots

    graph, result = solved(bad)
    assert result.schedule is not None
    for draw in (plots.draw_live_bytes, plots.draw_ribbon, plots.draw_peak_values):
        figure, ax = pyplot.subplots()
        draw(ax, graph, result.schedule)
        figure.savefig(tmp_path / "figure.svg")
        pyplot.close(figure)
        assert "<script" not in (tmp_path / "figure.svg").read_text()
