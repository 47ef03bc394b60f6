"""The fast books of a peak, against the simulator."""

from __future__ import annotations

import pytest

import remat
from remat.graph_capture.sizes.ranged_graph import BytesOver
from remat.graph_capture.sizes.symbols import Symbol, points
from remat.schedules.family import FastPeak, resized_schedule
from remat.schedules.simulate import simulate
from tests.ranged_graphs import chain


@pytest.mark.parametrize("size", ["64*n", "64*(n % 7) + n"])
@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_they_say_what_the_judge_says_at_each_size(size: str, budget: str) -> None:
    graph = chain(size, workspace_bytes=40)
    schedule = remat.solve(graph.bounding(graph.symbols), budget).schedule
    assert schedule is not None
    fast, known = FastPeak(graph.base, schedule), BytesOver(graph)
    for sizes in points(graph.symbols):
        at = graph.at(**sizes)
        alone = (Symbol("n", sizes["n"], sizes["n"]),)
        judged = simulate(at, resized_schedule(schedule, at)).peak_bytes
        assert fast.peak_bytes(known.of(alone)) == judged
        part = (Symbol("n", 2, sizes["n"]),)
        bounding = graph.bounding(part)
        bound = simulate(bounding, resized_schedule(schedule, bounding)).peak_bytes
        assert fast.peak_bytes(known.of(part)) == bound >= judged
