"""Online policies as planners: their formulas, their memory, and the plans they make."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.baselines.evictions import CoopPolicy, DtePolicy, LruPolicy
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.simulate import simulate
from remat.solver import make_solver, solve_within
from remat.solver.policies.eviction import Policy, ValueStatistics
from remat.solver.policies.online import NoRoomError, OnlineRun, offer_policy
from remat.solver.policies.policies import Dtr, DtrPolicy, LargestPolicy, MspsPolicy, neighbourhood
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.search import Search
from remat.solver.state import schedule_of
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.solver.graphs.captured_order import keeps_order
from tests.solver.graphs.random_graphs import (
    MIB,
    chain,
    gpt_like,
    resnet_like,
    training_graphs,
    unet_like,
)

POLICIES = (
    ("dtr", {"variant": "full"}),
    ("dtr", {"variant": "eq"}),
    ("dtr", {"variant": "local"}),
    ("lru", {}),
    ("largest", {}),
    ("msps", {}),
    ("dte", {}),
    ("coop", {}),
)
GRAPHS = {
    "gpt2": functools.partial(gpt_like, 2),
    "unet3": functools.partial(unet_like, 3),
    "resnet6": functools.partial(resnet_like, 6),
    "chain20": functools.partial(chain, 20),
}
HUGE_BYTES = 1 << 60


@functools.cache
def graph_of(name: str) -> TrainingGraph:
    return GRAPHS[name]()


@functools.cache
def peak_bytes_of(name: str) -> int:
    return solve_within(graph_of(name), HUGE_BYTES, "store_all").peak_bytes


def path(sizes_bytes: tuple[int, ...], costs_us: tuple[float, ...]) -> TrainingGraph:
    """Ops in a row, each reading the one before."""
    ops = tuple(
        Op(f"v{i}", "t", "backward", (f"v{i - 1}",) if i else (), (f"v{i}",), cost_us)
        for i, cost_us in enumerate(costs_us)
    )
    values = tuple(Value(op.name, b, op.name) for op, b in zip(ops, sizes_bytes, strict=True))
    return TrainingGraph("path", ops, values, outputs=(ops[-1].name,))


@pytest.mark.parametrize("percent", rows([80, 55, 35], lambda percent: percent == 55))
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("solver", "options"), POLICIES)
def test_plans_keep_the_budget_or_name_one_that_does(
    solver: str, options: dict[str, object], name: str, percent: int
) -> None:
    graph, budget_bytes = graph_of(name), peak_bytes_of(name) * percent // 100
    result = solve_within(graph, budget_bytes, solver, prune=False, **options)
    pruned = solve_within(graph, budget_bytes, solver, **options)
    for found in (result, pruned):
        if found.schedule is None:
            is_proved = budget_bytes < least_needed_bytes(Problem.of(graph))
            assert found.status == ("infeasible" if is_proved else "none found")
            assert budget_bytes < found.least_feasible_bytes <= peak_bytes_of(name)
        else:
            simulation = simulate(graph, found.schedule)
            assert simulation.peak_bytes == found.peak_bytes <= budget_bytes
            assert simulation.time_us == found.time_us
    if result.schedule is not None:
        assert pruned.schedule is not None
        assert pruned.time_us <= result.time_us


@pytest.mark.parametrize(("solver", "options"), POLICIES)
def test_every_policy_runs_a_transformer_at_half_its_peak(
    solver: str, options: dict[str, object]
) -> None:
    graph = gpt_like(4)
    peak_bytes = solve_within(graph, HUGE_BYTES, "store_all").peak_bytes
    result = solve_within(graph, peak_bytes // 2, solver, **options)
    assert result.schedule is not None
    assert 0 < result.overhead < 0.4
    assert result.schedule.options == {**options, "prune": True}
    again = solve_within(graph, peak_bytes // 2, solver, **options)
    assert again.schedule == result.schedule


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=16), st.integers(20, 99), st.sampled_from(POLICIES))
def test_plans_of_any_graph_are_valid(
    graph: TrainingGraph, percent: int, policy: tuple[str, dict[str, object]]
) -> None:
    solver, options = policy
    peak_bytes = solve_within(graph, HUGE_BYTES, "store_all").peak_bytes
    budget_bytes = peak_bytes * percent // 100
    result = solve_within(graph, budget_bytes, solver, **options)
    if result.schedule is None:
        assert result.status != "time limit"
        named_bytes = result.least_feasible_bytes
        assert budget_bytes < named_bytes <= peak_bytes
        result = solve_within(graph, named_bytes, solver, **options)
        budget_bytes = named_bytes
    assert result.schedule is not None
    assert simulate(graph, result.schedule).peak_bytes <= budget_bytes


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=16), st.integers(40, 99), st.sampled_from(POLICIES))
def test_books_of_a_run_bound_what_its_sequence_needs(
    graph: TrainingGraph, percent: int, policy: tuple[str, dict[str, object]]
) -> None:
    problem = Problem.of(graph)
    peak_bytes = solve_within(graph, HUGE_BYTES, "store_all").peak_bytes
    room_bytes = (peak_bytes - problem.resident_bytes) * percent // 100
    run = OnlineRun(problem, policy_of(*policy, problem, room_bytes))
    try:
        sequence = run.run()
    except NoRoomError:
        return
    assert keeps_order(problem, sequence)
    found = simulate(graph, schedule_of(problem, sequence))
    assert found.peak_bytes <= room_bytes + problem.resident_bytes
    assert all(run.status[v] == "live" for v in problem.needs[problem.n_ops])


def policy_of(solver: str, options: dict[str, object], problem: Problem, room: int) -> Policy:
    if solver == "dtr":
        return DtrPolicy(problem, room, around=neighbourhood(problem, options["variant"]))  # type: ignore[arg-type]
    made = {
        "lru": LruPolicy, "largest": LargestPolicy, "msps": MspsPolicy,
        "dte": DtePolicy, "coop": CoopPolicy,
    }  # fmt: skip
    return made[solver](problem, room)


def three_values() -> tuple[Problem, ValueStatistics, np.ndarray]:
    """Four in a row: a evicted, then b, c, d live; used at 2, 10 and 13 of 20 us."""
    problem = Problem.of(path((1 * MIB, 2 * MIB, 1 * MIB, 4 * MIB), (7.0, 3.0, 5.0, 6.0)))
    books = ValueStatistics(problem)
    books.clock_us = 20.0
    books.used_us[:] = (0.0, 2.0, 10.0, 13.0)
    books.evictable[1:] = 1
    return problem, books, np.array([1, 2, 3])


def test_formulas_on_three_values() -> None:
    problem, books, values = three_values()
    mib = np.array([2, 1, 4])
    around = {"full": (7.0, 0.0, 0.0), "eq": (7.0, 0.0, 0.0), "local": (0.0, 0.0, 0.0)}
    stale = np.array([18.0, 10.0, 7.0])
    for variant, cost_us in around.items():
        policy = DtrPolicy(problem, 0, around=neighbourhood(problem, variant))  # type: ignore[arg-type]
        policy.evicted(0)
        for v in (1, 2, 3):
            assert policy.around is None or policy.around.refresh(v) in (True, False)
        expected = (np.array([3.0, 5.0, 6.0]) + cost_us) / (mib * MIB * stale)
        assert policy.scores(books, values) == pytest.approx(expected)
        assert policy.victims(books, 1) == (int(values[np.argmin(expected)]),)
    assert LruPolicy(problem, 0).scores(books, values) == pytest.approx(1 / stale)
    assert LruPolicy(problem, 0).victims(books, 1) == (1,)
    assert LargestPolicy(problem, 0).scores(books, values) == pytest.approx(1 / (mib * MIB))
    assert LargestPolicy(problem, 0).victims(books, 1) == (3,)
    msps = MspsPolicy(problem, 0)
    msps.evicted(0)
    assert msps.victims(books, 1) == (3,)
    msps.around.refresh(1)  # type: ignore[union-attr]
    assert msps.scores(books, values) == pytest.approx(np.array([5.0, 5.0, 1.5]) / MIB)


def test_dte_counts_the_holes_on_both_sides() -> None:
    problem, books, values = three_values()
    policy = DtePolicy(problem, 9 * MIB)
    for v, size_bytes in enumerate(problem.size_bytes):
        assert policy.place(v, size_bytes, v)
    policy.memory.release(0)
    policy.evicted(0)
    books.reruns[3] = 2
    hole_mib = np.array([2 + 1, 1, 4 + 1])
    cost_us = (np.array([3.0 + 7.0, 5.0, 6.0]) + 1e-3) * np.array([1, 1, 1.0001**2])
    expected = cost_us / (hole_mib * (np.array([18.0, 10.0, 7.0]) + 1e-3))
    assert policy.scores(books, values) == pytest.approx(expected)


def test_coop_evicts_neighbours_and_parts_cheap_from_costly() -> None:
    problem = Problem.of(path((4, 4, 4, 4, 8), (1.0, 9.0, 1.0, 1.0, 1.0)))
    policy, books = CoopPolicy(problem, 16), ValueStatistics(problem)
    assert [policy.is_costly(op) for op in range(5)] == [False, True, False, False, False]
    assert all(policy.place(v, 4, v) for v in range(4))
    assert policy.arena.at == {0: 0, 2: 4, 3: 8, 1: 12}
    books.evictable[:4] = 1
    books.clock_us = 10.0
    books.used_us[:4] = (0.0, 0.0, 5.0, 9.0)
    assert not policy.place(4, 8, 4)
    assert policy.victims(books, 8) == [0, 2]
    books.evictable[2] = 0
    assert policy.victims(books, 8) == [3, 1]
    assert policy.victims(books, 12) == ()


def test_what_cannot_be_made_again_is_kept_or_given_up() -> None:
    """A pinned source of few bytes stays while its large result may be evicted."""
    problem = Problem.of(chain_from_a_draw(source_bytes=1, result_bytes=8))
    run = OnlineRun(problem, LruPolicy(problem, 21))
    assert run.run() == [0, 1, 2, 3, 1, 4]
    problem = Problem.of(chain_from_a_draw(source_bytes=9, result_bytes=8))
    run = OnlineRun(problem, LruPolicy(problem, 24))
    assert run.run() == [0, 1, 2, 3, 4]
    assert run.status[0] == "lost"


def chain_from_a_draw(source_bytes: int, result_bytes: int) -> TrainingGraph:
    """draw -> a -> b -> c, and the end reads a and c."""
    ops = (
        Op("draw", "t", "backward", (), ("draw",), 1.0, no_recompute="draws randomly"),
        Op("a", "t", "backward", ("draw",), ("a",), 1.0),
        Op("b", "t", "backward", ("a",), ("b",), 1.0),
        Op("c", "t", "backward", ("b",), ("c",), 1.0),
        Op("end", "t", "backward", ("a", "c"), ("end",), 1.0),
    )
    sizes = (source_bytes, result_bytes, 8, 8, 1)
    values = tuple(Value(op.name, b, op.name) for op, b in zip(ops, sizes, strict=True))
    return TrainingGraph("draw", ops, values, outputs=("end",))


def test_a_recomputed_source_stays_until_its_last_reader_has_run() -> None:
    """A ladder, each rung read by the next two: freed too early it would double at each rung."""
    rungs = 24
    reads = [tuple(f"x{j}" for j in (i - 2, i - 1) if j >= 0) for i in range(rungs)]
    ops = [Op(f"x{i}", "t", "backward", reads[i], (f"x{i}",), 1.0) for i in range(rungs)]
    ops.append(Op("big", "t", "backward", (), ("big",), 1.0, workspace_bytes=4))
    ops.append(Op("end", "t", "backward", (f"x{rungs - 1}", "big"), ("end",), 1.0))
    values = tuple(Value(op.name, 1, op.name) for op in ops)
    problem = Problem.of(TrainingGraph("ladder", tuple(ops), values, outputs=("end",)))
    sequence = OnlineRun(problem, LruPolicy(problem, 5)).run()
    assert sequence == [*range(rungs + 1), *range(rungs), rungs + 1]


@pytest.mark.parametrize("room_bytes", [9, 10])
def test_a_value_in_the_callers_hands_counts_twice_while_its_op_runs_again(
    room_bytes: int,
) -> None:
    ops = (
        Op("f", "t", "forward", (), ("held", "s"), 1.0),
        Op("big", "t", "backward", (), ("big",), 1.0, workspace_bytes=room_bytes - 5),
        Op("end", "t", "backward", ("s", "big"), ("end",), 1.0),
    )
    sizes = (("held", 4, "f"), ("s", 1, "f"), ("big", 1, "big"), ("end", 1, "end"))
    values = tuple(Value(*described) for described in sizes)
    graph = TrainingGraph("held", ops, values, ("held",), ("held", "end"))
    run = OnlineRun(Problem.of(graph), LruPolicy(Problem.of(graph), room_bytes))
    if room_bytes == 10:
        assert run.run() == [0, 1, 0, 2]
    else:
        with pytest.raises(NoRoomError):
            run.run()


def test_options_and_limits() -> None:
    with pytest.raises(SolverError, match="unknown variant 'best'; there are full, eq, local"):
        make_solver("dtr", variant="best")
    graph, peak_bytes = graph_of("gpt2"), peak_bytes_of("gpt2")
    nothing = Dtr().solve(graph, 0)
    assert nothing.status == "infeasible"
    assert "no schedule fits 0 bytes" in nothing.message
    late = Dtr(time_limit_s=0.0).solve(graph, peak_bytes // 2)
    assert late.status == "time limit"
    assert late.least_feasible_bytes == peak_bytes


@pytest.mark.parametrize(("most_runs", "is_found"), [(1, False), (4, True)])
def test_a_start_takes_no_more_runs_than_allowed(most_runs: int, is_found: bool) -> None:
    search = Search(graph_of("gpt2"), peak_bytes_of("gpt2") * 6 // 10, "test", AMPLE_S)
    offer_policy(search, MspsPolicy, most_runs)
    assert (search.best is not None) == is_found
    assert search.lowest is None, "the least peak of a policy is not asked for"


def test_an_interrupt_keeps_what_was_found() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    result = Dtr(progress=interrupt).solve(graph_of("gpt2"), peak_bytes_of("gpt2") // 2)
    assert result.schedule is None
    assert "interrupted" in result.message


def test_thousands_of_ops_take_seconds() -> None:
    graph = gpt_like(40)
    peak_bytes = solve_within(graph, HUGE_BYTES, "store_all").peak_bytes
    result = solve_within(graph, peak_bytes // 2, "dtr", time_limit_s=AMPLE_S)
    assert result.schedule is not None
    assert result.overhead < 0.2
