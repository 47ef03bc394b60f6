"""The peak of one schedule at every size of a range, against the simulator at each size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import remat
from remat.graph_capture.errors import ScheduleError, SolverError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.sizes.ranged_graph import Extent, RangedGraph
from remat.graph_capture.sizes.symbols import Symbol, points
from remat.schedules.family import peak_over, resized_schedule
from remat.schedules.schedule import Compute, Free, Schedule
from remat.schedules.simulate import simulate


def ranged(size_bytes: str, high: int = 9, batch_bytes: str = "n") -> RangedGraph:
    """Two ops in forward and one in backward; the first value takes `size_bytes`."""
    values = (
        Value("a", 0, "a"),
        Value("b", 8, "b", "output"),
        Value("t", 8, "tangents", "tangent"),
        Value("g", 16, "g", "gradient"),
    )
    ops = (
        Op("a", "aten.mm", "forward", (), ("a",), cost_us=1),
        Op("b", "aten.sum", "forward", ("a",), ("b",), cost_us=1),
        Op("tangents", "remat.tangents", "backward", (), ("t",), no_recompute="they arrive"),
        Op("g", "aten.mul", "backward", ("a", "t"), ("g",), cost_us=1),
    )
    base = TrainingGraph("M", ops, values, ("b",), ("b", "g", "t"))
    symbols = (Symbol("n", 2, high),)
    return RangedGraph(
        base, symbols, {"a": Extent(("n",), size_bytes)}, ("x: [{n}]",), (batch_bytes,)
    )


def keeping(graph: TrainingGraph) -> Schedule:
    steps: list[Any] = [Compute(op.name) for op in graph.ops]
    return Schedule.for_graph(graph, [*steps, Free("a")])


def judged(graph: RangedGraph, schedule: Schedule) -> dict[int, int]:
    peaks: dict[int, int] = {}
    for sizes in points(graph.symbols):
        at = graph.at(**sizes)
        peaks[sizes["n"]] = simulate(at, resized_schedule(schedule, at)).peak_bytes
    return peaks


@pytest.mark.parametrize(
    ("size_bytes", "batch_bytes", "proof"),
    [
        ("64*n", "8*n", "largest sizes"),
        ("64*((n - 2) // 3 + 1)", "n", "largest sizes"),
        ("64*(n % 5) + n", "n", "every size"),
        ("8*n", "100*(9 - n)", "every size"),
    ],
)
def test_no_size_has_a_higher_peak(size_bytes: str, batch_bytes: str, proof: str) -> None:
    graph = ranged(size_bytes, batch_bytes=batch_bytes)
    schedule = keeping(graph.at(n=4))
    found, peaks = peak_over(graph, schedule), judged(graph, schedule)
    assert found.proof == proof
    assert found.n_sizes == 8
    assert found.peak_bytes == max(peaks.values()) == peaks[found.sizes["n"]]


@pytest.mark.parametrize("size_bytes", ["64*(n % 5) + n", "64*(n % 97) + 8*(5000 - n)", "3*n"])
def test_of_many_sizes_parts_are_judged_until_one_size_has_what_bounds_them_all(
    size_bytes: str,
) -> None:
    graph = ranged(size_bytes, high=3000)
    schedule = keeping(graph.at(n=4))
    found, peaks = peak_over(graph, schedule), judged(graph, schedule)
    assert found.proof == ("largest sizes" if size_bytes == "3*n" else "parts")
    assert found.peak_bytes == max(peaks.values()) == peaks[found.sizes["n"]]


def test_too_many_sizes_that_nothing_bounds_are_refused() -> None:
    graph = ranged("((7919*n) % 4999)*((104729*n) % 4999)", high=5000)
    with pytest.raises(ScheduleError, match="The bytes of a may fall"):
        peak_over(graph, keeping(graph.at(n=4)))
    part = (Symbol("n", 2, 40),)
    assert peak_over(graph, keeping(graph.at(n=4)), part).n_sizes == 39


def test_steps_carry_over_to_sizes_of_the_same_step_alone() -> None:
    graph = ranged("64*n")
    schedule = keeping(graph.at(n=4))
    assert resized_schedule(schedule, graph.at(n=9)).steps == schedule.steps
    first, *rest = graph.base.ops
    changed = msgspec.structs.replace(first, target="aten.bmm")
    other = msgspec.structs.replace(graph.base, ops=(changed, *rest))
    with pytest.raises(ScheduleError, match="made for other ops"):
        resized_schedule(schedule, other)


def test_what_is_no_range_or_no_schedule_is_told() -> None:
    graph = ranged("64*n")
    at = graph.at(n=4)
    with pytest.raises(ScheduleError, match="needs a graph over a range, and this is Training"):
        peak_over(at, keeping(at))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScheduleError, match=r"pass result.schedule .*: this is NoneType"):
        peak_over(graph, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SolverError, match="a plan is made for a step, and this is int"):
        remat.solve(3, "60%")  # pyright: ignore[reportArgumentType, reportCallIssue]
