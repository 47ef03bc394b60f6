"""The page as a file: its figures are the simulator's, and it needs nothing else."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from html.parser import HTMLParser

import msgspec
import pytest

from remat.analysis.compare import sweep
from remat.analysis.plan_report import page_facts, report
from remat.formats import bytes_text, percent_text, time_text
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.report.page import page_data, script_safe
from remat.schedules.simulate import simulate
from remat.schedules.timeline import timeline
from remat.solver import Result, solve_within
from tests.limits import AMPLE_S
from tests.schedules.conftest import Planned
from tests.solver.graphs.random_graphs import gpt_like


class Elements(HTMLParser):
    """Start tags with their attributes, and the text of each element with an id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page(planned: Planned) -> str:
    return report(planned.graph, planned.result)


@pytest.fixture(scope="module")
def data(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_figures_are_the_simulators(planned: Planned, data: dict) -> None:
    found, summary = simulate(planned.graph, planned.schedule), data["summary"]
    assert summary["peak_bytes"] == found.peak_bytes
    assert summary["time_us"] == found.time_us
    assert summary["overhead"] == found.overhead
    assert summary["gap"] == pytest.approx(planned.result.gap)
    facts = planned.facts
    unmodified = simulate(facts.unmodified_graph, facts.unmodified_schedule)
    assert summary["unmodified_peak_bytes"] == unmodified.peak_bytes
    line = timeline(planned.graph, planned.schedule)
    assert data["runs"]["live_bytes"] == line.live_bytes.tolist()
    assert max(data["runs"]["live_bytes"]) == found.peak_bytes
    assert (
        data["unmodified"]["live_bytes"]
        == timeline(facts.unmodified_graph, facts.unmodified_schedule).live_bytes.tolist()
    )


def test_bands_and_stays_agree_with_the_live_bytes(planned: Planned, data: dict) -> None:
    live = data["runs"]["live_bytes"]
    for bands in data["bands"].values():
        curves = [list(itertools.accumulate(band["changes"])) for band in bands]
        assert [sum(column) for column in zip(*curves, strict=True)] == live
    run, stays, sizes = data["peak_run"], data["stays"], data["values"]["size_bytes"]
    held = [
        sizes[value]
        for value, begin, end in zip(stays["value"], stays["begin"], stays["end"], strict=True)
        if begin <= run < end
    ]
    workspace = simulate(planned.graph, planned.schedule).workspace_at_peak_bytes
    assert sum(held) + planned.graph.resident.total_bytes + workspace == live[run]


def test_a_person_reads_the_same_figures(planned: Planned, page: str) -> None:
    text = " ".join(Elements(page).text)
    result = planned.result
    for figure in (
        bytes_text(result.peak_bytes), bytes_text(result.budget_bytes),
        time_text(result.time_us), percent_text(result.overhead),
    ):  # fmt: skip
        assert figure in text
    assert "live at the peak" in text
    assert "blocks.0" in text


@pytest.mark.slow
def test_rules_and_fronts_are_judged(planned: Planned) -> None:
    front = sweep(planned.graph, 3, ["cut"], time_limit_s=AMPLE_S).fronts["cut"]
    facts = page_facts(planned.graph, planned.result, front)
    ((name, points),) = facts.fronts
    assert name == "cut"
    for point in points:
        result = next(r for budget, r in front.points if budget == point.budget_bytes)
        assert result.schedule is not None
        assert point.peak_bytes == simulate(planned.graph, result.schedule).peak_bytes
    rules = {rule.name: rule for rule in facts.rules}
    assert {"unmodified", "full", "chen_sqrt"} <= set(rules)
    assert rules["full"].peak_bytes < rules["unmodified"].peak_bytes
    said = page_data(facts)
    assert said["fronts"]["cut"] == points
    assert "front cut" in said["colours"]


def test_a_front_of_another_step_is_refused(planned: Planned) -> None:
    front = sweep(gpt_like(2), 2, ["chen_sqrt"], time_limit_s=AMPLE_S).fronts["chen_sqrt"]
    with pytest.raises(ScheduleError, match="by chen_sqrt, is of another graph than the plan of"):
        report(planned.graph, planned.result, fronts=front)


def test_the_page_asks_for_nothing(page: str) -> None:
    for tag, attributes in Elements(page).tags:
        for name in ("src", "href", "action", "data"):
            assert not re.match(r"(https?:)?//", attributes.get(name) or ""), tag
    assert "default-src 'none'" in page
    assert "@import" not in page


def test_the_page_can_be_used_without_a_mouse(page: str) -> None:
    tags = Elements(page).tags
    by_id = {a["id"]: (tag, a) for tag, a in tags if a.get("id")}
    for name in ("memory", "ribbon"):
        assert by_id[name][1]["tabindex"] == "0"
        assert by_id[name][1]["aria-label"]
        assert by_id[f"{name}-said"][1]["aria-live"] == "polite"
    named = [a["aria-labelledby"] for _, a in tags if "aria-labelledby" in a]
    assert named
    assert all(name in by_id for name in named)
    names = [tag for tag, _ in tags]
    assert names.count("caption") == names.count("table")
    assert names.count("main") == names.count("h1") == 1
    assert "html" in names
    assert next(a for tag, a in tags if tag == "html")["lang"] == "en"
    assert "prefers-color-scheme: dark" in page


def test_names_cannot_end_the_script(planned: Planned) -> None:
    bad = "</script><script>alert(1)</script><!--"
    ops = tuple(msgspec.structs.replace(op, module=bad) for op in planned.graph.ops)
    graph = msgspec.structs.replace(planned.graph, ops=ops, name=bad)
    text = report(graph, planned.result)
    assert "<script>alert" not in text
    assert "&lt;/script&gt;" in text
    data = page_data(page_facts(graph, planned.result))
    assert json.loads(script_safe(data))["model"] == bad


@functools.cache
def with_thousands_of_ops() -> tuple[TrainingGraph, Result]:
    graph = _with_names(gpt_like(130))
    assert len(graph.ops) >= 5000
    everything = solve_within(graph, 1 << 60, "store_all")
    return graph, solve_within(graph, int(0.8 * everything.peak_bytes), "chen_sqrt")


@pytest.mark.slow
def test_thousands_of_ops_stay_small() -> None:
    assert len(report(*with_thousands_of_ops()).encode()) < 3_000_000


@pytest.mark.clock
def test_thousands_of_ops_stay_quick() -> None:
    graph, result = with_thousands_of_ops()
    begin_s = time.process_time()
    report(graph, result)
    assert time.process_time() - begin_s < 20


def _with_names(graph: TrainingGraph) -> TrainingGraph:
    """The graph with places as long as those of real models."""
    n_ops = len(graph.ops)
    ops = tuple(
        msgspec.structs.replace(
            op, target="aten.native_layer_norm_backward.default",
            module=f"model.layers.{130 * i // n_ops}.self_attn.projection",
            source=f"/home/someone/projects/model/source/attention.py:{i % 400}",
        )
        for i, op in enumerate(graph.ops)
    )  # fmt: skip
    return msgspec.structs.replace(graph, ops=ops)


def test_without_a_plan_there_is_no_report(planned: Planned) -> None:
    lost = solve_within(planned.graph, 1000, "chen_sqrt")
    with pytest.raises(ScheduleError, match="no plan to report: none was found within 1000 bytes"):
        report(planned.graph, lost)
