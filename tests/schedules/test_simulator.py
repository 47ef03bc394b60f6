"""The simulator against a memory model written differently: from lifetimes, not a replay."""

from __future__ import annotations

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import CUSTOM, Op, TrainingGraph, Value
from remat.schedules.schedule import Compute, Free, Schedule, Step
from remat.schedules.simulate import simulate
from tests.schedules.random_walks import random_steps
from tests.solver.graphs.random_graphs import training_graphs


def lifetimes(graph: TrainingGraph, steps: list[Step]) -> list[tuple[str, int, int]]:
    """(value, first step, last step) of each stay of each value in memory."""
    stays: list[tuple[str, int, int]] = []
    for value in (value for value in graph.values if value.producer):
        births = [i for i, s in enumerate(steps) if s == Compute(value.producer)]
        deaths = [i for i, s in enumerate(steps) if s == Free(value.name)]
        born = -1
        for death in [*deaths, len(steps)]:
            inside = [i for i in births if born < i < death]
            if inside:
                stays.append((value.name, inside[0], death))
            born = death
    return stays


def model_peak_bytes(graph: TrainingGraph, steps: list[Step]) -> int:
    """Resident, plus stays that overlap a step, plus workspace and copies of live outputs."""
    op = {o.name: o for o in graph.ops}
    size = {value.name: value.size_bytes for value in graph.values}
    stays = lifetimes(graph, steps)
    highest = 0
    for i, step in enumerate(steps):
        now = sum(size[v] for v, first, last in stays if first <= i <= last)
        if isinstance(step, Compute):
            older = {v for v, first, last in stays if first < i <= last}
            now += op[step.op].workspace_bytes
            now += sum(size[v] for v in op[step.op].outputs if v in older)
        highest = max(highest, now)
    return highest + graph.resident.total_bytes


@settings(max_examples=200, deadline=None)
@given(training_graphs(max_ops=8), st.integers(0, 1 << 30))
def test_simulate_agrees_with_lifetimes(graph: TrainingGraph, seed: int) -> None:
    steps = random_steps(graph, seed)
    schedule = Schedule.for_graph(graph, steps)
    try:
        found = simulate(graph, schedule)
    except ScheduleError:
        reject()
    assert found.peak_bytes == model_peak_bytes(graph, steps)
    cost = {op.name: op.cost_us for op in graph.ops}
    assert found.time_us == sum(cost[s.op] for s in steps if isinstance(s, Compute))


@pytest.mark.parametrize("module", ["", "norm"])
def test_a_custom_op_runs_twice_only_if_recompute_names_its_module(module: str) -> None:
    ops = (
        Op(
            "a",
            "own.op",
            "forward",
            (),
            ("a",),
            1.0,
            no_recompute=f"{CUSTOM} may draw",
            module=module,
        ),
        Op("b", "aten.sum", "backward", ("a",), ("b",), 1.0),
    )
    values = tuple(Value(op.name, 64, op.name) for op in ops)
    graph = TrainingGraph("own", ops, values, outputs=("b",))
    steps = (Compute("a"), Free("a"), Compute("a"), Compute("b"))
    with pytest.raises(ScheduleError, match="op a must not run twice"):
        simulate(graph, Schedule.for_graph(graph, steps))
    asked = Schedule.for_graph(graph, steps, options={"recompute": "norm"})
    if module:
        assert simulate(graph, asked).time_us == 3.0
    else:
        with pytest.raises(ScheduleError, match="op a must not run twice"):
            simulate(graph, asked)
