"""Plans of schema 1, in which a copy moved a value and took no time."""

from __future__ import annotations

import json

import pytest

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import simulate
from remat.solver.segments.revolve import Revolve
from tests.graphs import peak_bytes_of
from tests.links import with_links
from tests.solver.graphs.random_graphs import chain


def moved(steps: tuple[Step, ...]) -> list[list[str]]:
    """Steps as schema 1 wrote them: the drops that `Offload` and `Fetch` meant are left out."""
    found: list[list[str]] = []
    gone: set[Step] = set()
    for step in steps:
        if step in gone:
            gone.discard(step)
            continue
        if isinstance(step, Offload):
            gone.add(Free(step.value))
        elif isinstance(step, Fetch):
            gone.add(Free(step.value, "host"))
        name = step.op if isinstance(step, Compute) else step.value
        found.append([type(step).__name__.lower(), name])
    return found


def peak_where_copies_move(graph: TrainingGraph, steps: list[list[str]]) -> int:
    """The peak as schema 1 had it: a value is live from where it is made, or fetched, on."""
    size = {value.name: value.size_bytes for value in graph.values}
    op_of = {op.name: op for op in graph.ops}
    live: set[str] = set()
    most = 0
    for kind, name in steps:
        if kind == "compute":
            op = op_of[name]
            extra = sum(size[value] for value in op.outputs) + op.workspace_bytes
            most = max(most, sum(size[value] for value in live) + extra)
            live.update(op.outputs)
        elif kind == "fetch":
            live.add(name)
        else:
            live.discard(name)
        most = max(most, sum(size[value] for value in live))
    return most + graph.resident.total_bytes


@pytest.mark.parametrize("disk_slots", [1, 2, 3])
def test_a_plan_that_offloads_is_read_with_the_drops_that_it_meant(disk_slots: int) -> None:
    graph = with_links(chain(24))
    result = Revolve(slots=4, disk_slots=disk_slots).solve(graph, peak_bytes_of(graph) * 6 // 10)
    assert result.schedule is not None
    new = result.schedule
    assert new.moves
    text = json.loads(new.to_json()) | {"steps": moved(new.steps), "schema_version": 1}
    old = Schedule.from_json(json.dumps(text))
    assert old == new
    found = simulate(graph, old)
    assert found.peak_bytes == peak_where_copies_move(graph, text["steps"])
    assert found.time_us == result.time_us
    assert Schedule.from_json(old.to_json()) == old


def test_a_plan_of_a_later_schema_is_refused() -> None:
    graph = chain(4)
    text = json.loads(Schedule.for_graph(graph, ()).to_json()) | {"schema_version": 3}
    with pytest.raises(ScheduleError, match="schema version 3, and this release reads 2"):
        Schedule.from_json(json.dumps(text))
