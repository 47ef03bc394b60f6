"""Sequences of ops become schedules; orders of first computations are judged."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import ScheduleError, SolverError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.problem import Problem, is_allowed, predecessors, reordered
from remat.solver.state import State, recomputed_by_stage, schedule_of
from tests.solver.graphs.captured_order import keeps_order
from tests.solver.graphs.random_graphs import training_graphs


def op_sequence(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    return [graph.op_index[step.op] for step in schedule.steps if isinstance(step, Compute)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=9))
def test_a_sequence_needs_no_more_than_the_schedule_it_came_from(graph: TrainingGraph) -> None:
    peak_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
    result = solve_within(graph, peak_bytes * 9 // 10, "cut")
    if result.schedule is None:
        return
    problem, sequence = Problem.of(graph), op_sequence(graph, result.schedule)
    found = simulate(graph, schedule_of(problem, sequence))
    assert keeps_order(problem, sequence)
    assert found.peak_bytes <= result.peak_bytes
    assert found.time_us <= result.time_us
    state = State.from_recomputed(problem, recomputed_by_stage(problem, sequence))
    assert graph.time_us + state.cost_us <= found.time_us + 1e-6


@settings(max_examples=200, deadline=None)
@given(training_graphs(max_ops=9), st.data())
def test_runs_that_nothing_needs_make_no_invalid_schedule(
    graph: TrainingGraph, data: st.DataObject
) -> None:
    problem = Problem.of(graph)
    stages: list[list[int]] = []
    for t in range(problem.n_ops + 1):
        free = [op for op in range(t) if not problem.no_recompute[op]]
        stages.append(sorted(data.draw(st.sets(st.sampled_from(free)))) if free else [])
    state = State.from_recomputed(problem, stages)
    found = simulate(graph, state.schedule())
    assert found.peak_bytes == int(state.peak_bytes.max())
    assert found.time_us == pytest.approx(graph.time_us + state.cost_us)


def test_what_needs_the_most_is_made_again_first() -> None:
    ops = (
        Op("a", "t", "forward", (), ("a",), 1.0),
        Op("small", "t", "forward", ("a",), ("small",), 1.0),
        Op("wide", "t", "forward", ("a",), ("wide",), 1.0, workspace_bytes=100),
        Op("between", "t", "forward", ("a",), ("between",), 1.0),
        Op("sum", "t", "forward", ("small", "wide"), ("sum",), 1.0),
    )
    sizes = {"a": 5, "small": 10, "wide": 1, "between": 1, "sum": 1}
    values = tuple(Value(name, size, name) for name, size in sizes.items())
    problem = Problem.of(TrainingGraph("wide", ops, values, outputs=("sum",)))
    state = State.from_recomputed(problem, [[], [], [], [], [1, 2], []])
    assert state.stages[4].recomputed == (2, 1)
    assert state.stages[4].rise_bytes == 101
    peak_bytes = int(state.peak_bytes.max())
    assert simulate(problem.graph, state.schedule()).peak_bytes == peak_bytes == 106


def diamond(kinds: tuple[str, str] = ("activation", "activation")) -> TrainingGraph:
    """Two ops that could run in either order, each with a source of its own."""
    ops = (
        Op(
            "s0",
            "t",
            "forward",
            (),
            ("s0",),
            1.0,
            no_recompute="draws" if "rng_state" in kinds else "",
        ),
        Op("s1", "t", "forward", (), ("s1",), 1.0),
        Op("a", "t", "forward", ("s0",), ("a",), 1.0),
        Op("b", "t", "forward", ("s1",), ("b",), 1.0),
        Op("c", "t", "backward", ("a", "b"), ("c",), 1.0),
    )
    kind = {"s0": kinds[0], "s1": kinds[1]}
    values = tuple(Value(op.name, 8, op.name, kind.get(op.name, "activation")) for op in ops)  # type: ignore[arg-type]
    return TrainingGraph("diamond", ops, values)


def test_first_runs_may_come_in_any_order_that_data_allows() -> None:
    graph = diamond()
    other = reordered(graph, (1, 3, 0, 2, 4))
    result = solve_within(other, 1 << 40, "store_all")
    assert result.schedule is not None
    again = Schedule.for_graph(graph, result.schedule.steps)
    assert simulate(graph, again).time_us == 5.0
    assert not is_allowed(graph, (2, 0, 1, 3, 4))
    assert not is_allowed(graph, (0, 1, 2, 4, 3))
    with pytest.raises(SolverError, match="cannot run in this order"):
        reordered(graph, (2, 0, 1, 3, 4))


def test_draws_keep_their_captured_order() -> None:
    graph = diamond(("rng_state", "rng_state"))
    assert graph.ordered_ops == ("s0", "a", "b")
    assert 2 in predecessors(graph)[3]
    swapped = [Compute(name) for name in ("s0", "s1", "b", "a", "c")]
    with pytest.raises(ScheduleError, match="op b must first run after a, as captured"):
        simulate(graph, Schedule.for_graph(graph, swapped))


def test_backward_opens_with_the_tangents() -> None:
    graph = diamond()
    opening = Op("d", "remat.tangents", "backward", (), ("d",), 0.0)
    ops = (*graph.ops[:4], opening, graph.ops[4])
    values = (*graph.values, Value("d", 8, "d", "tangent"))
    opened = msgspec.structs.replace(graph, ops=ops, values=values)
    steps = [Compute(name) for name in ("s0", "s1", "a", "b", "c", "d")]
    with pytest.raises(ScheduleError, match="op c runs before tangents"):
        simulate(opened, Schedule.for_graph(opened, steps))
    assert not is_allowed(opened, (0, 1, 2, 3, 5, 4))
    assert is_allowed(opened, (1, 0, 2, 3, 4, 5))
