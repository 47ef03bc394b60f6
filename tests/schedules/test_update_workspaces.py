"""Updates behind a sum of gradients take what is more than earlier updates gave back."""

from __future__ import annotations

import pytest

from remat.graph_capture.graph import UPDATE, Op, Resident, TrainingGraph, Value
from remat.schedules.layout import buffers_of
from remat.schedules.schedule import Compute, Free, Schedule, update_workspaces
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.reductions.updates import without_rule


def step(gradients_bytes: int = 90) -> TrainingGraph:
    """Two parameters, of 60 and 30 bytes, whose updates take 50 and 80."""
    ops = (
        Op("a", "aten.mm.default", "forward", ("w", "v"), ("a",), 1.0),
        Op("tangents", "remat.tangents", "backward", (), ("t",), no_recompute="they arrive"),
        Op("gw", "aten.mm.default", "backward", ("t", "a"), ("gw",), 1.0),
        Op(
            "first",
            UPDATE,
            "backward",
            ("gw", "w"),
            (),
            workspace_bytes=50,
            no_recompute="it writes",
        ),
        Op("gv", "aten.mm.default", "backward", ("t", "a"), ("gv",), 1.0),
        Op(
            "second",
            UPDATE,
            "backward",
            ("gv", "v"),
            (),
            workspace_bytes=80,
            no_recompute="it writes",
        ),
    )
    made = {"a": 10, "gw": 60, "gv": 30}
    values = (
        Value("w", 60, kind="parameter"), Value("v", 30, kind="parameter"),
        *(Value(name, size, name) for name, size in made.items()), Value("t", 4, "tangents"),
    )  # fmt: skip
    resident = Resident(parameters_bytes=90, gradients_bytes=gradients_bytes)
    return TrainingGraph(
        "Step", ops, values, forward_outputs=("a",), outputs=("a", "t"), resident=resident
    )


IN_ORDER = ("a", "tangents", "gw", "first", "gv", "second")
OTHERWISE = ("a", "tangents", "gv", "second", "gw", "first")


def scheduled(graph: TrainingGraph, order: tuple[str, ...]) -> Schedule:
    freed = {"first": Free("gw"), "second": Free("gv")}
    steps = [part for op in order for part in (Compute(op), freed.get(op)) if part]
    return Schedule.for_graph(graph, steps)


@pytest.mark.parametrize(
    ("order", "workspaces", "peak_bytes"),
    [(IN_ORDER, {"first": 50, "second": 20}, 124), (OTHERWISE, {"second": 80, "first": 20}, 124)],
)
def test_each_update_has_what_earlier_ones_gave_back(
    order: tuple[str, ...], workspaces: dict[str, int], peak_bytes: int
) -> None:
    graph = step()
    assert update_workspaces(graph, order) == workspaces
    schedule = scheduled(graph, order)
    found = simulate(graph, schedule)
    assert found.peak_bytes == graph.resident.total_bytes + peak_bytes
    buffers = buffers_of(graph, schedule)
    assert buffers.load_bytes == peak_bytes


def test_without_a_sum_nothing_is_given_back() -> None:
    graph = step(gradients_bytes=0)
    assert update_workspaces(graph, IN_ORDER) == {}
    assert simulate(graph, scheduled(graph, IN_ORDER)).peak_bytes == 90 + 124


def test_solvers_are_asked_for_what_the_judge_counts() -> None:
    graph = step()
    free = without_rule(graph)
    assert [op.workspace_bytes for op in free.ops if op.no_recompute == "it writes"] == [50, 20]
    found = solve_within(graph, graph.resident.total_bytes + 124, "cut")
    assert found.schedule is not None
    assert simulate(graph, found.schedule).peak_bytes == found.peak_bytes
