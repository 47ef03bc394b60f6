"""The picture of a layout: few rectangles that hide nothing, drawn without a script."""

from __future__ import annotations

import functools
import itertools
import re

import msgspec
import numpy as np
import pytest

from remat.analysis.plan_figures import place
from remat.analysis.plan_report import page_facts, report
from remat.formats import bytes_text
from remat.graph_capture.errors import LayoutError
from remat.schedules.layout import Buffers, Layout, buffers_of
from remat.schedules.report.svg import (
    HEIGHT,
    WIDTH,
    Addresses,
    addresses,
    arena_picture,
)
from remat.solver import solve_within
from tests.schedules.conftest import Planned
from tests.solver.graphs.random_graphs import gpt_like

RECTANGLES = re.compile(r"M(\d+) (\d+)h(\d+)v(\d+)")


@pytest.fixture(scope="module")
def layout(planned: Planned) -> Layout:
    return place(planned.graph, planned.schedule)


@pytest.fixture(scope="module")
def found(planned: Planned, layout: Layout) -> Addresses:
    return addresses(planned.graph, planned.schedule, layout)


def side_by_side(buffers: Buffers) -> Layout:
    """Each buffer above the one before it."""
    offsets = np.cumsum([0, *buffers.size_bytes.tolist()]).tolist()
    return Layout(
        tuple(offsets[:-1]), offsets[-1], buffers.load_bytes, 1, buffers.hash, "one by one"
    )


def test_boxes_are_the_buffers_with_their_places(planned: Planned, found: Addresses) -> None:
    buffers, offsets = found.buffers, found.layout.offsets_bytes
    places = {
        (name, int(start), offset)
        for name, start, offset in zip(buffers.names, buffers.start, offsets, strict=True)
    }
    assert {(box.name, box.start, box.low) for box in found.boxes} == places
    assert len(found.boxes) == len(buffers)
    areas = [(box.end - box.start) * (box.high - box.low) for box in found.boxes]
    assert areas == sorted(areas, reverse=True)
    assert {box.kind for box in found.boxes} >= {"activation", "gradient"}
    for one, other in itertools.combinations(found.boxes, 2):
        is_beside = one.end <= other.start or other.end <= one.start
        assert is_beside or one.high <= other.low or other.high <= one.low


def test_each_buffer_is_drawn(planned: Planned, layout: Layout, found: Addresses) -> None:
    """Small ones at least a unit high and wide, so that all can be seen."""
    picture = arena_picture(page_facts(planned.graph, planned.result, layout=layout))
    assert picture is not None
    drawn = {
        shape.name: [tuple(map(int, one)) for one in RECTANGLES.findall(shape.path)]
        for shape in picture.shapes
        if not shape.title
    }
    for shape in picture.shapes:
        if shape.title:
            drawn.setdefault(shape.name, []).append(
                tuple(map(int, RECTANGLES.findall(shape.path)[0]))
            )
    for box in found.boxes:
        middle = WIDTH * (box.start + box.end) / 2 / found.buffers.n_times
        low = HEIGHT - HEIGHT * (box.low + box.high) / 2 / found.layout.arena_bytes
        assert any(
            x - 1 <= middle <= x + width + 1 and y - 1 <= low <= y + height + 1
            for x, y, width, height in drawn[box.kind]
        )


@functools.cache
def thousands() -> tuple[Planned, Layout]:
    graph = gpt_like(130)
    planned = Planned(graph, solve_within(graph, 1 << 60, "store_all"))
    return planned, side_by_side(buffers_of(graph, planned.schedule))


@pytest.mark.slow
def test_the_picture_of_thousands_of_ops_stays_small() -> None:
    planned, layout = thousands()
    assert len(planned.graph.ops) >= 5000
    facts = page_facts(planned.graph, planned.result, layout=layout)
    picture = arena_picture(facts)
    assert picture is not None
    size = len(picture.live) + sum(len(f"{one}") for one in picture.shapes)
    assert size < 300_000


def test_the_picture_fills_its_frame_and_has_the_load_line(planned: Planned) -> None:
    layout = place(planned.graph, planned.schedule)
    picture = arena_picture(page_facts(planned.graph, planned.result, layout=layout))
    assert picture is not None
    assert bytes_text(layout.arena_bytes) in picture.says
    assert bytes_text(layout.load_bytes) in picture.says
    assert picture.load_y == HEIGHT - round(HEIGHT * layout.load_bytes / layout.arena_bytes)
    tops = [int(y) for y in re.findall(r"[ML]\d+ (\d+)", picture.live)]
    assert min(tops) == picture.load_y
    assert picture.live.endswith(f"H{WIDTH}")
    for shape in picture.shapes:
        for x, y, width, height in RECTANGLES.findall(shape.path):
            assert int(x) + int(width) <= WIDTH + 1
            assert int(y) + int(height) <= HEIGHT + 1
    assert picture.ticks[-1].text == bytes_text(layout.arena_bytes)


def test_the_page_has_the_picture_where_there_is_a_layout(planned: Planned, layout: Layout) -> None:
    page = report(planned.graph, planned.result, layout=layout)
    assert '<svg class="arena"' in page
    assert "Addresses in one arena" in page
    assert page.count("<title>") > 100
    assert '<svg class="arena"' not in report(planned.graph, planned.result)


def test_names_in_the_picture_are_no_markup(planned: Planned) -> None:
    bad = "</title><script>alert(1)</script>"
    graph = planned.graph
    name = graph.ops[0].outputs[0]

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(bad if one == name else one for one in names)

    ops = tuple(
        msgspec.structs.replace(op, inputs=renamed(op.inputs), outputs=renamed(op.outputs))
        for op in graph.ops
    )
    values = tuple(
        msgspec.structs.replace(v, name=bad, size_bytes=1 << 30) if v.name == name else v
        for v in graph.values
    )
    named = msgspec.structs.replace(graph, ops=ops, values=values)
    result = solve_within(named, 1 << 40, "store_all")
    assert result.schedule is not None
    page = report(named, result, layout=place(named, result.schedule))
    assert "&lt;/title&gt;&lt;script&gt;" in page
    assert "<script>alert" not in page


def test_a_layout_of_another_step_is_refused(planned: Planned, layout: Layout) -> None:
    everything = solve_within(planned.graph, 1 << 60, "store_all")
    with pytest.raises(LayoutError, match="the layout was made for another one"):
        report(planned.graph, everything, layout=layout)
