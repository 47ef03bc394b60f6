"""What a state of a hosting problem stands for."""

from __future__ import annotations

import msgspec
import numpy as np

from remat.schedules.schedule import Compute, Free, Schedule
from remat.schedules.simulate import simulate
from remat.solver.offload.fetch_as_recompute import (
    most_by_stage,
    movable,
    untimed_schedule,
    with_fetches,
)
from remat.solver.problem import Problem
from remat.solver.state import store_all_state
from tests.graphs import peak_bytes_of
from tests.links import links
from tests.solver.graphs.random_graphs import gpt_like
from tests.solver.offload.hosted_cases import many_cases


def test_a_hosted_op_reads_nothing_and_costs_its_copy() -> None:
    problem = Problem.of(gpt_like(1))
    pinned = problem.no_recompute.index(True)
    there = links(50.0)
    for cost_factor in (1.0, 0.5):
        mine = with_fetches(problem, {pinned, 3}, there, cost_factor=cost_factor)
        for op in (pinned, 3):
            assert mine.inputs[op] == ()
            assert not mine.no_recompute[op]
            assert mine.cost_us[op] == cost_factor * problem.output_bytes[op] / 50_000.0
        assert mine.needs == problem.needs
        assert mine.cost_us[2] == problem.cost_us[2]


def test_random_states_are_on_the_host_anyway() -> None:
    problem = Problem.of(gpt_like(1))
    assert movable(problem) == [size > 0 for size in problem.size_bytes]


def test_without_hosted_ops_a_base_is_the_schedule() -> None:
    graph = gpt_like(1)
    state = store_all_state(Problem.of(graph))
    base = untimed_schedule(state, ())
    assert base.off_spans == ()
    assert base.peak_bytes == peak_bytes_of(graph)
    steps = [Compute(name) if kind == "compute" else Free(name) for kind, name in base.items]
    assert tuple(steps) == state.schedule().steps


def test_values_are_absent_between_two_items_and_made_once() -> None:
    for case in many_cases(60):
        items = case.base.items
        for value, leaves, returns in case.base.off_spans:
            assert items[leaves] == ("leave", value)
            assert items[returns] == ("arrive", value)
            assert case.base.made[value] < leaves < returns
            between = [name for kind, name in items[leaves + 1 : returns] if kind == "compute"]
            read = {v for op in between for v in case.graph.ops[case.graph.op_index[op]].inputs}
            assert value not in read
        kinds = [kind for kind, _ in items]
        assert kinds.count("leave") == kinds.count("arrive") == len(case.base.off_spans)


def test_bytes_of_a_base_are_those_of_copies_that_take_no_time() -> None:
    """Where a value that leaves is free for nothing, the simulator sees the same bytes."""
    for case in many_cases(60):
        live = dict.fromkeys(case.graph.value_by_name, 0)
        size = {value.name: value.size_bytes for value in case.graph.values}
        for (kind, name), most in zip(case.base.items, case.base.live_bytes, strict=True):
            if kind == "compute":
                op = case.graph.ops[case.graph.op_index[name]]
                made = sum(size[v] for v in op.outputs) + op.workspace_bytes
                now = sum(size[v] for v, there in live.items() if there)
                assert most == case.graph.resident.total_bytes + now + made
                live.update(dict.fromkeys(op.outputs, 1))
            else:
                live[name] = int(kind == "arrive")


def test_bytes_in_flight_are_the_most_of_each_stage() -> None:
    graph = gpt_like(1)
    base = untimed_schedule(store_all_state(Problem.of(graph)), ())
    flight = np.arange(len(base.items))
    ran = (name if kind == "compute" else "" for kind, name in base.items)
    most = most_by_stage(graph, ran, flight)
    first = [i for i, (kind, _) in enumerate(base.items) if kind == "compute"]
    assert most.tolist() == [*first, len(base.items) - 1]
    steps = [Compute(op.name) for op in graph.ops]
    assert simulate(graph, Schedule.for_graph(graph, steps)).time_us == graph.time_us


def test_what_is_added_to_stays_on_the_device_as_a_copy_would_be_stale() -> None:
    graph = gpt_like(1)
    last, value = graph.ops[-1], graph.values[-1]
    first = graph.ops[-2].outputs[0]
    change = msgspec.structs.replace
    op = change(last, name="sum", inputs=(first, *last.outputs), outputs=("sum",))
    total = change(value, name="sum", producer="sum", size_bytes=0)
    added = change(graph, ops=(*graph.ops, op), values=(*graph.values, total))
    before, after = (
        {name for name, can in zip(one.names, movable(one), strict=True) if can}
        for one in (Problem.of(graph), Problem.of(added))
    )
    assert before - after == {first}
