"""No op reads a parameter after its update: the simulator's rule, and schedules that keep it."""

from __future__ import annotations

import pytest

from remat.graph_capture.errors import ScheduleError, SolverError
from remat.graph_capture.graph import ACCUMULATE, UPDATE, Op, TrainingGraph, Value
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.problem import Problem
from remat.solver.reductions import updates
from remat.solver.reductions.updates import (
    has_updates,
    late_sequence,
    solve_with_updates,
    with_updates_behind,
    without_rule,
)
from remat.solver.result import evaluate_schedule
from remat.solver.state import ops_of, schedule_of


def step(b_bytes: int = 100) -> TrainingGraph:
    """Forward makes a and b of w; backward has the gradient of w long before it needs b."""
    ops = (
        Op("a", "aten.mm.default", "forward", ("x", "w"), ("a",), 1.0),
        Op("b", "aten.mm.default", "forward", ("a", "w"), ("b",), 1.0),
        Op("loss", "aten.sum.default", "forward", ("b",), ("loss",), 1.0),
        Op("tangents", "remat.tangents", "backward", (), ("t",), no_recompute="they arrive"),
        Op("gw", "aten.mm.default", "backward", ("t", "a"), ("gw",), 1.0),
        Op(
            "update",
            UPDATE,
            "backward",
            ("gw", "w"),
            (),
            workspace_bytes=10,
            no_recompute="it writes",
        ),
        Op("wide", "aten.mm.default", "backward", ("t",), ("wide",), 1.0),
        Op("big", "aten.sum.default", "backward", ("wide",), ("big",), 1.0),
        Op("ga", "aten.mm.default", "backward", ("t", "b", "big"), ("ga",), 1.0),
    )
    made = {"a": 100, "b": b_bytes, "loss": 4, "gw": 40, "wide": 300, "big": 10, "ga": 40}
    values = (
        Value("x", 50, kind="input"), Value("w", 60, kind="parameter"),
        *(Value(name, size, name) for name, size in made.items()), Value("t", 4, "tangents"),
    )  # fmt: skip
    return TrainingGraph(
        "Step", ops, values, forward_outputs=("loss",), outputs=("loss", "t", "ga")
    )


def late_read(graph: TrainingGraph) -> Schedule:
    """It computes b again behind the update, of the new parameter."""
    order = ["a", "b", "loss", "tangents", "gw", "update", "wide", "big", "a", "b", "ga"]
    problem = Problem.of(graph)
    return schedule_of(problem, [graph.op_index[name] for name in order])


def test_the_judge_refuses_a_read_behind_the_update() -> None:
    graph = step()
    free = without_rule(graph)
    assert [op.target for op in free.ops].count(ACCUMULATE) == 1
    assert not has_updates(free)
    assert simulate(free, late_read(free)).time_us == 9
    with pytest.raises(ScheduleError, match="op a reads w, which op update has updated"):
        simulate(graph, late_read(graph))


def test_an_update_waits_for_the_last_reader_and_keeps_its_gradient() -> None:
    graph = step()
    problem = Problem.of(graph)
    sequence = late_sequence(problem, ops_of(problem, late_read(graph)))
    names = [graph.ops[i].name for i in sequence]
    assert names == ["a", "b", "loss", "tangents", "gw", "wide", "big", "a", "b", "update", "ga"]
    late = simulate(graph, schedule_of(problem, sequence))
    assert late.time_us == 9
    # The gradient is live beside the tangent, the loss, wide and big.
    assert late.peak_bytes == 40 + 4 + 4 + 300 + 10


def test_updates_keep_no_order_among_each_other_and_run_once() -> None:
    graph = step()
    assert "update" not in graph.ordered_ops
    steps = [Compute(op.name) for op in graph.ops]
    at = next(i for i, one in enumerate(steps) if one.op == "update")
    with pytest.raises(ScheduleError, match="op update must not run twice"):
        simulate(graph, Schedule.for_graph(graph, [*steps[: at + 1], *steps[at:]]))


@pytest.mark.parametrize("solver", ["auto", "cut", "checkmate", "dtr", "chen_sqrt"])
@pytest.mark.parametrize("budget_bytes", [320, 400, 500])
def test_what_solvers_find_fits_and_keeps_the_rule(solver: str, budget_bytes: int) -> None:
    graph = step()
    result = solve_within(graph, budget_bytes, solver)
    schedule = result.schedule or result.least_schedule
    assert schedule is not None
    found = simulate(graph, schedule)
    if result.schedule is None:
        assert result.least_feasible_bytes == found.peak_bytes > budget_bytes
    else:
        assert result.peak_bytes == found.peak_bytes <= budget_bytes
    assert result.lower_bound_us <= found.time_us
    assert schedule.budget_bytes in (budget_bytes, result.least_feasible_bytes)


def test_a_gradient_that_waits_counts() -> None:
    """Keeping b beside wide takes 418 bytes, making it again 318, and 358 with the gradient.

    In less, the gradient is made again for the update behind the last read.
    """
    graph = step()
    assert solve_within(graph, 418, "auto").time_us == 7
    late = solve_within(graph, 400, "auto")
    assert late.schedule is not None
    assert late.schedule.computations()["b"] == 2
    assert late.peak_bytes == 358
    assert solve_within(without_rule(graph), 330, "auto").peak_bytes == 318
    again = solve_within(graph, 330, "auto")
    assert again.schedule is not None
    assert again.schedule.computations()["gw"] == 2
    assert again.peak_bytes == 318
    lost = solve_within(graph, 317, "auto")
    assert (lost.status, lost.least_feasible_bytes) == ("infeasible", 318)
    assert lost.message.startswith("no schedule fits 317 bytes; 318 bytes are known to be enough. ")
    assert "below the floor of 318 bytes, set by op big" in lost.message


def test_a_little_more_than_the_least_may_need_no_late_read() -> None:
    """The least peak without the rule is 318 by making b again, which takes 358 with the rule.

    Keeping b takes 328. A solver that is asked for the least alone does not find it.
    """
    graph = step(b_bytes=10)
    asked: list[int] = []

    def ask(one: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
        asked.append(budget_bytes)
        keeps_b = Schedule.for_graph(one, schedule_of(Problem.of(one), range(len(one.ops))).steps)
        schedule = keeps_b if budget_bytes >= 328 else late_read(one)
        return evaluate_schedule(one, schedule, budget_bytes=budget_bytes, lower_bound_us=0.0)

    lost = solve_with_updates(graph, 0, ask, 60.0)
    assert asked == [0, 318, 318, 321, 321, 330]
    assert (lost.status, lost.least_feasible_bytes) == ("none found", 328)
    assert lost.least_schedule is not None
    assert simulate(graph, lost.least_schedule).peak_bytes == 328


def test_a_late_update_stands_behind_the_op_that_its_parameter_was_read_for() -> None:
    graph = step()
    placed = with_updates_behind(graph, late_read(without_rule(graph)))
    assert [op.name for op in placed.ops] == [
        "a", "b", "loss", "tangents", "gw", "wide", "big", "ga", "update",
    ]  # fmt: skip
    in_time = Schedule.for_graph(graph, [Compute(op.name) for op in graph.ops])
    assert with_updates_behind(graph, in_time).ops == graph.ops


@pytest.mark.parametrize(
    ("placed_order", "calls", "peak_bytes"),
    [
        ("a b loss tangents gw wide big a b ga gw update", [(False, 340), (True, 340)], 318),
        ("a b loss tangents gw wide big ga update", [(False, 340), (True, 340), (False, 322)], 0),
    ],
)
def test_updates_that_come_too_early_are_placed_and_where_that_has_none_less_is_asked_for(
    placed_order: str, calls: list[tuple[bool, int]], peak_bytes: int
) -> None:
    """Making b again takes 318 bytes, 358 with the gradient; what is placed takes 318 or 458."""
    graph = step()
    asked: list[tuple[bool, int]] = []

    def ask(one: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
        is_placed = one.ops[-1].name == "update"
        asked.append((is_placed, budget_bytes))
        order = [one.op_index[name] for name in placed_order.split()]
        schedule = schedule_of(Problem.of(one), order) if is_placed else late_read(one)
        return evaluate_schedule(one, schedule, budget_bytes=budget_bytes, lower_bound_us=0.0)

    found = solve_with_updates(graph, 340, ask, 60.0)
    assert asked[: len(calls)] == calls
    assert found.peak_bytes == peak_bytes
    if not peak_bytes:
        assert (
            found.message
            == "no schedule found that fits 340 bytes; 358 bytes are known to be enough"
        )


def test_an_update_that_cannot_wait_is_placed_and_the_error_raised_if_that_does_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = step()

    def ask(one: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
        is_placed = one.ops[-1].name == "update"
        order = ["a", "b", "loss", "tangents", "gw", "wide", "big", "a", "b", "ga", "gw", "update"]
        placed = schedule_of(Problem.of(one), [one.op_index[name] for name in order])
        schedule = placed if is_placed else late_read(one)
        return evaluate_schedule(one, schedule, budget_bytes=budget_bytes, lower_bound_us=0.0)

    def refusing(one: TrainingGraph, schedule: Schedule, budget_bytes: int) -> Schedule:
        if schedule.computations()["gw"] == 1:
            raise SolverError("a gradient returns")
        return real(one, schedule, budget_bytes)

    real = updates.made_late
    monkeypatch.setattr(updates, "made_late", refusing)
    assert solve_with_updates(graph, 340, ask, 60.0).peak_bytes == 318

    def never(*_: object) -> Schedule:
        raise SolverError("a gradient returns")

    monkeypatch.setattr(updates, "made_late", never)
    with pytest.raises(SolverError, match="a gradient returns"):
        solve_with_updates(graph, 340, ask, 60.0)
