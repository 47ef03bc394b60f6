"""The simulator against a memory model written differently: from lifetimes, not a replay."""

from __future__ import annotations

import random

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Free, Schedule, Step
from remat.schedules.simulate import simulate
from tests.solver.random_graphs import training_graphs


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


def random_steps(graph: TrainingGraph, seed: int) -> list[Step]:
    """A valid walk: sometimes drop a value, sometimes run an op again, else the next op."""
    source, steps, live = random.Random(seed), list[Step](), dict[str, None]()
    made = {value.name for value in graph.values if value.producer}
    for following, op in enumerate(graph.ops):
        for _ in range(source.randint(0, 3)):
            if live and source.random() < 0.5:
                steps.append(Free(source.choice(list(live))))
                del live[steps[-1].value]
            else:
                _run(graph, source.randint(0, following), following, live, steps, made)
        _run(graph, following, following, live, steps, made, is_first=True)
        assert op.name == graph.ops[following].name
    for name in graph.outputs:
        if name not in live:
            _run(graph, graph.op_index[graph.value_by_name[name].producer], len(graph.ops), live,
                 steps, made)  # fmt: skip
    return steps


def _run(graph, index, following, live, steps, made, is_first=False) -> None:
    op = graph.ops[index]
    if not is_first and (op.pinned or index >= following or all(v in live for v in op.outputs)):
        return
    for v in op.inputs:
        if v in made and v not in live:
            _run(
                graph, graph.op_index[graph.value_by_name[v].producer], following, live, steps, made
            )
    steps.append(Compute(op.name))
    live.update(dict.fromkeys(op.outputs))


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
