"""What each lever brings: beside the same plan without it, by `simulate` and in other ways."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import remat
from remat.analysis.levers import (
    RECOMPUTATION,
    UPDATES,
    LeverEffect,
    levers_of,
    without_chunks,
    without_recomputation,
    without_updates,
)
from remat.graph_capture.costs.op_costs import measure_costs
from remat.graph_capture.graph import CUSTOM, Op, Resident, TrainingGraph, Value
from remat.graph_capture.tracing.trace import trace
from remat.levers.optimizer_in_backward import planned_optimizer_in_backward
from remat.schedules.derived import graph_of_schedule, unchunked
from remat.schedules.schedule import Compute, Free, Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.problem import Problem
from remat.solver.state import schedule_of
from tests.graph_capture.chunking.language_models import LanguageModel, batch, plain
from tests.limits import AMPLE_S


def chain() -> TrainingGraph:
    """x -> a -> b; backward reads b, then a, and updates p with gb, then q with ga."""
    ops = (
        Op("a", "aten.a", "forward", ("x", "p"), ("a",), 5.0),
        Op("b", "aten.b", "forward", ("a", "q"), ("b",), 20.0),
        Op("gb", "aten.gb", "backward", ("b",), ("gb",), 1.0),
        Op("update_gb", "remat.update", "backward", ("gb", "q"), (), 0.0, 7, "it updates"),
        Op("ga", "aten.ga", "backward", ("a",), ("ga",), 1.0),
        Op("update_ga", "remat.update", "backward", ("ga", "p"), (), 0.0, 7, "it updates"),
    )
    sizes = {"a": 100, "b": 40, "gb": 50, "ga": 60}
    resident = (Value("x", 0), *(Value(name, 10, kind="parameter") for name in "pq"))
    values = (*resident, *(Value(name, size, name) for name, size in sizes.items()))
    return TrainingGraph("Chain", ops, values, resident=Resident(parameters_bytes=20))


def again() -> Schedule:
    """a is made a second time."""
    steps = [Compute("a"), Compute("b"), Free("a"), Compute("gb"), Free("b"), Compute("update_gb")]
    steps += [Free("gb"), Compute("a"), Compute("ga"), Free("a"), Compute("update_ga"), Free("ga")]
    return Schedule.for_graph(chain(), steps)


def test_by_hand_a_plan_without_recomputation_and_without_updates() -> None:
    """With both, a + ga or b beside a: 20 + 160. Once each: a + b + gb = 190.

    Without updates gb stays to the end: a + gb + ga = 210.
    """
    graph, schedule = chain(), again()
    assert simulate(graph, schedule).peak_bytes == 180
    once, updated = levers_of(graph, schedule)
    assert (once.name, once.off_bytes, once.saved_bytes) == (RECOMPUTATION, 210, 30)
    assert once.extra == pytest.approx(5 / 27)
    assert (updated.name, updated.off_bytes, updated.extra) == (UPDATES, 230, 0.0)


def test_summed_gradients_are_released_without_updates() -> None:
    graph = chain()
    summed = TrainingGraph(
        graph.name, graph.ops, graph.values, resident=Resident(20, gradients_bytes=20)
    )
    off, schedule = without_updates(summed, Schedule.for_graph(summed, again().steps))
    assert {op.target for op in off.ops if op.phase == "backward"} >= {"remat.deliver"}
    assert simulate(off, schedule).peak_bytes == 20 + 20 + 160


def test_without_updates_the_optimizer_runs_once_whatever_runs_again_last() -> None:
    graph = chain()
    ops = [msgspec.structs.replace(op, cost_us=3.0 if "update" in op.name else 1.0)
           for op in graph.ops]  # fmt: skip
    ops.insert(5, Op("gx", "aten.gx", "backward", ("ga",), ("gx",), 1.0))
    values = (*graph.values, Value("gx", 10, "gx"))
    graph = msgspec.structs.replace(graph, ops=tuple(ops), values=values)
    steps = list(again().steps)
    at = steps.index(Compute("ga")) + 1
    steps[at:at] = [Compute("gx"), Free("gx"), Compute("gx"), Free("gx")]
    schedule = Schedule.for_graph(graph, steps)
    assert levers_of(graph, schedule)[-1].extra == 0.0
    assert simulate(*without_updates(graph, schedule)).time_us == 13.0


def test_an_order_of_a_sum_is_no_time() -> None:
    graph = chain()
    ops = tuple(msgspec.structs.replace(op, cost_us=0.1) for op in graph.ops)
    graph = msgspec.structs.replace(graph, ops=ops)
    once = schedule_of(Problem.of(graph), range(len(ops)))
    here, there = simulate(graph, once), simulate(*without_updates(graph, once))
    assert 0 < there.time_us - here.time_us < 1e-9
    (updated,) = levers_of(graph, once)
    assert " for 0.0 % of a step" in str(updated)


def test_summed_gradients_are_released_in_the_order_of_the_plan() -> None:
    graph = chain()
    summed = TrainingGraph(
        graph.name, graph.ops, graph.values, resident=Resident(20, gradients_bytes=20)
    )
    late = [step for step in again().steps if step not in (Compute("update_gb"), Free("gb"))]
    steps = (*late, Compute("update_gb"), Free("gb"))
    schedule = Schedule.for_graph(summed, steps)
    off, without = without_updates(summed, schedule)
    assert [step.op for step in without.steps if isinstance(step, Compute)][-1] == "update_gb"
    assert levers_of(summed, schedule)[-1].off_bytes == simulate(off, without).peak_bytes


def test_a_solver_is_asked_without_updates_but_not_without_recomputation() -> None:
    asked: list[TrainingGraph] = []

    def solve_without(graph: TrainingGraph) -> Any:
        asked.append(graph)
        return solve_within(graph, 150, "exhaustive")

    once, updated = levers_of(chain(), again(), solve_without)
    (off,) = asked
    assert not any(op.target == "remat.update" for op in off.ops)
    assert not once.solved
    assert updated.solved
    assert not updated.off_fits
    assert updated.off_least_bytes > 150
    assert "Without it, nothing fits; the lowest known peak is" in str(updated)


def test_a_lever_is_said_in_one_line() -> None:
    mib = 1 << 20
    lever = LeverEffect("head and its loss in 8 chunks", 100 * mib, 412 * mib, 0.011)
    text = "head and its loss in 8 chunks: -312.0 MiB for 1.1 % of a step; without, this plan peaks"
    assert str(lever) == f"{text} at 412.0 MiB"
    solved = LeverEffect("x", mib, mib, 0.0, solved=True, off_fits=True, off_overhead=0.216)
    assert "x: nothing off this peak for 0.0 % of a step" in str(solved)
    assert str(solved).endswith("Without it, the overhead is 21.6 %")


def test_a_plan_that_uses_no_lever_has_none() -> None:
    graph = remat.capture(LanguageModel(plain), batch(), split="none")
    result = remat.solve(graph, "100%", solver="store_all")
    assert result.schedule is not None
    assert levers_of(graph, result.schedule) == ()


@pytest.mark.parametrize("split", ["exact", "tolerance"])
def test_a_plan_without_its_chunks_is_one_of_the_captured_graph(split: Any) -> None:
    """In captured order, and with nothing made again, it is the step that keeps everything."""
    graph = remat.capture(LanguageModel(plain, bias=True), batch(16), split=split, device="h100")
    everything = solve_within(unchunked(graph), 1 << 60, "store_all")
    fits = remat.solve(graph, "80%", solver="cut", time_limit_s=AMPLE_S).schedule
    least = remat.solve(graph, "min", solver="hierarchical", time_limit_s=AMPLE_S).schedule
    for schedule in (fits, least):
        assert schedule is not None
        assert schedule.chunks
        off, without = without_chunks(graph, schedule)
        assert off.hash == graph.hash
        assert {step.op for step in without.steps if isinstance(step, Compute)} == {
            op.name for op in graph.ops
        }
        found = simulate(off, without)
        lever = levers_of(graph, schedule)[-1]
        assert lever.off_bytes == found.peak_bytes
        assert lever.name == f"head and its loss in {schedule.chunks[0].chunks} chunks"
        if without.computations().most_common(1)[0][1] == 1:
            assert found.peak_bytes == everything.peak_bytes
            assert found.time_us == pytest.approx(everything.time_us)


def test_without_chunks_what_runs_again_still_reads_parameters_before_their_updates() -> None:
    model, args = LanguageModel(plain), batch(16)
    release = planned_optimizer_in_backward(model, "sgd", "cpu")
    traced = trace(model, args, gradient_release=release, split="exact", optimizer="sgd")
    graph = measure_costs(traced)
    chunked = remat.solve(graph, "min", solver="hierarchical", time_limit_s=AMPLE_S).schedule
    assert chunked is not None
    assert chunked.chunks
    planned = graph_of_schedule(graph, chunked)
    once = [op for op in planned.ops if op.target != "remat.update"]
    again = [op for op in once if op.phase == "forward" and not op.no_recompute]
    updates = [op for op in planned.ops if op.target == "remat.update"]
    order = [planned.op_index[op.name] for op in (*once, *again, *updates)]
    schedule = msgspec.structs.replace(chunked, steps=schedule_of(Problem.of(planned), order).steps)
    assert simulate(planned, schedule).time_us > planned.time_us
    chunks, updated = levers_of(graph, schedule)[-2:]
    assert (chunks.name[:13], updated.name) == ("head and its ", UPDATES)
    assert simulate(*without_chunks(graph, schedule)).time_us > graph.time_us


def test_without_updates_a_custom_op_that_recompute_names_still_runs_twice() -> None:
    graph = chain()
    first = msgspec.structs.replace(graph.ops[0], no_recompute=f"{CUSTOM} may draw", module="own")
    graph = msgspec.structs.replace(graph, ops=(first, *graph.ops[1:]))
    schedule = Schedule.for_graph(graph, again().steps, options={"recompute": "own"})
    assert simulate(*without_updates(graph, schedule)).time_us == 32


def test_a_plan_without_updates_is_one_of_the_step_that_updates_afterwards() -> None:
    model, args = LanguageModel(plain), batch(1, 2)
    gradient_release = planned_optimizer_in_backward(model, "sgd", "cpu")
    traced = trace(model, args, gradient_release=gradient_release, split="none", optimizer="sgd")
    graph = measure_costs(traced)
    kept = solve_within(graph, 1 << 60, "store_all").schedule
    assert kept is not None
    (lever,) = levers_of(graph, kept)
    after = remat.capture(model, args, split="none", optimizer="sgd")
    assert lever.off_bytes == solve_within(after, 1 << 60, "store_all").peak_bytes
    assert lever.saved_bytes > 0
    assert without_recomputation(graph, kept)[0] == graph_of_schedule(graph, kept)
