"""One neighbourhood: the event program against exhaustive search, and how solves are stopped."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.local_search.events import (
    EventBuilder,
    EventProgram,
    RunningSolvers,
    Runs,
    Tried,
    TryLimits,
    candidate_stages,
    solve_events,
)
from remat.solver.local_search.neighbourhoods import runs_by_stage, sequence_of_runs
from remat.solver.problem import Problem
from remat.solver.state import schedule_of
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.rows import each_nth
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import training_graphs
from tests.solver.graphs.tight_cases import TightCase, tight_cases

ENOUGH = TryLimits(deterministic=5.0, seconds=AMPLE_S)
"""So that any program of these tests is searched to its end."""


def nothing_again(problem: Problem) -> Runs:
    """The runs of the step that keeps everything."""
    return [[] for _ in range(problem.n_ops + 1)]


def every_stage(problem: Problem) -> dict[int, list[int]]:
    """Each op that may run again, at every stage at which it can."""
    n = problem.n_ops
    return {op: list(range(op + 1, n + 1)) for op in range(n) if not problem.no_recompute[op]}


def extra_us(problem: Problem, runs: Runs) -> float:
    return sum(problem.cost_us[op] for again in runs for op in again)


def solved(
    problem: Problem,
    base: Runs,
    stages_of: dict[int, list[int]],
    budget_bytes: int,
    below_us: float = float("inf"),
    running: RunningSolvers | None = None,
) -> Tried:
    """The outcome of the neighbourhood of `base` in which `stages_of` is free."""
    program = EventBuilder(problem, base, stages_of).build(budget_bytes - problem.resident_bytes)
    fixed = [op for op in range(problem.n_ops) if op not in stages_of]
    return solve_events(program, base, fixed, below_us, ENOUGH, running or RunningSolvers())


def check_outcome(problem: Problem, runs: Runs, budget_bytes: int) -> None:
    """`runs` are in captured order, and a schedule that fits and takes no more than they say."""
    for stage, again in enumerate(runs):
        assert again == sorted(set(again))
        assert all(op < stage for op in again)
    found = simulate(problem.graph, schedule_of(problem, sequence_of_runs(problem, runs)))
    assert found.peak_bytes <= budget_bytes
    assert found.time_us <= problem.graph.time_us + extra_us(problem, runs)


@pytest.mark.parametrize("seed", each_nth(4, range(4)))
def test_all_ops_in_all_stages_give_the_optimum_of_one_sweep(seed: int) -> None:
    """In a stage an op runs again at most once, in captured order: what a sweep can do."""
    reached = 0
    cases = tight_cases(20, 300 + seed)
    for graph, budget_bytes, optimum_us in cases:
        problem = Problem.of(graph)
        one_sweep_us = least_time_us(graph, budget_bytes, one_sweep=True)
        outcome = solved(problem, nothing_again(problem), every_stage(problem), budget_bytes)
        assert outcome.finished
        reached += one_sweep_us == optimum_us
        if outcome.runs is None:
            assert one_sweep_us is None
            continue
        assert graph.time_us + extra_us(problem, outcome.runs) == one_sweep_us
        check_outcome(problem, outcome.runs, budget_bytes)
    assert reached >= 0.9 * len(cases), "one sweep is as good as any, as a rule"


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=8), st.integers(0, 100))
def test_any_graph_and_budget_give_the_optimum_of_one_sweep(
    graph: TrainingGraph, percent: int
) -> None:
    problem = Problem.of(graph)
    budget_bytes = peak_bytes_of(graph) * percent // 100
    outcome = solved(problem, nothing_again(problem), every_stage(problem), budget_bytes)
    found_us = None
    if outcome.runs is not None:
        check_outcome(problem, outcome.runs, budget_bytes)
        found_us = graph.time_us + extra_us(problem, outcome.runs)
    assert found_us == least_time_us(graph, budget_bytes, one_sweep=True)


def poor_runs(case: TightCase) -> Runs | None:
    """What runs again in the schedule of an online policy, if that fits."""
    schedule = solve_within(case.graph, case.budget_bytes, "lru").schedule
    return None if schedule is None else runs_by_stage(Problem.of(case.graph), schedule)


def test_outcomes_of_partial_neighbourhoods_fit_are_cheaper_and_leave_the_rest() -> None:
    source = random.Random(5)
    improved = 0
    for case in tight_cases(60, 400):
        problem, base = Problem.of(case.graph), poor_runs(case)
        if base is None:
            continue
        chosen = source.sample(range(problem.n_ops), source.randint(1, problem.n_ops))
        stages_of = candidate_stages(problem, base, chosen, source.randint(1, 3))
        assert set(stages_of) == {op for op in chosen if not problem.no_recompute[op]}
        below_us = extra_us(problem, base)
        found = solved(problem, base, stages_of, case.budget_bytes, below_us)
        assert found.finished
        if found.runs is None:
            continue
        improved += 1
        check_outcome(problem, found.runs, case.budget_bytes)
        assert extra_us(problem, found.runs) < below_us
        for stage, again in enumerate(found.runs):
            fixed = [op for op in base[stage] if op not in stages_of]
            assert [op for op in again if op not in stages_of] == fixed
            assert all(stage in stages_of[op] for op in again if op in stages_of)
    assert improved >= 5


def test_what_takes_as_long_is_not_cheaper() -> None:
    """Costs are no whole parts of CP-SAT's unit, so they are rounded there: 3 of 13 us is down."""
    facts = {"a": (3.0, 4, ()), "b": (4.0, 6, ()), "c": (6.0, 4, ("a",))}
    ops = [Op(n, "t", "forward", reads, (n,), cost) for n, (cost, _, reads) in facts.items()]
    values = [Value(name, size_bytes, name) for name, (_, size_bytes, _) in facts.items()]
    graph = TrainingGraph("three", tuple(ops), tuple(values), outputs=("c",))
    problem, again_us = Problem.of(graph), 3.0
    assert least_time_us(graph, 8) == 13 + again_us
    base = [[], [], [0], []]
    below_us = again_us * (1 - 1e-9)
    assert solved(problem, base, every_stage(problem), 8).runs == base
    assert solved(problem, base, every_stage(problem), 8, below_us).runs is None


def test_nothing_is_cheaper_than_the_optimum() -> None:
    """The optimum's own neighbourhood has nothing below it."""
    tried = 0
    for graph, budget_bytes, optimum_us in tight_cases(40, 500):
        if optimum_us is None:
            continue
        problem = Problem.of(graph)
        best = solved(problem, nothing_again(problem), every_stage(problem), budget_bytes)
        if best.runs is None:
            continue
        below_us = extra_us(problem, best.runs) * (1 - 1e-9)
        again = solved(problem, best.runs, every_stage(problem), budget_bytes, below_us)
        assert again == Tried(None, finished=True, effort=again.effort)
        tried += 1
    assert tried >= 40


def test_a_budget_below_what_is_fixed_needs_no_search() -> None:
    case = tight_cases(1, 600)[-1]
    problem = Problem.of(case.graph)
    program = EventBuilder(problem, nothing_again(problem), {}).build(-1)
    assert program.is_empty
    running = Recorder()
    outcome = solve_events(program, nothing_again(problem), (), 1.0, ENOUGH, running)
    assert (outcome.runs, outcome.finished, running.taken) == (None, True, [])


class Recorder(RunningSolvers):
    """Notes which solvers asked to begin, and whether they were let."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bool] = []

    def add(self, solver: Any) -> bool:
        self.taken.append(super().add(solver))
        return self.taken[-1]


class Stoppable:
    """Stands for a CP-SAT solver at work."""

    stopped = 0

    def stop_search(self) -> None:
        self.stopped += 1


def improvable() -> tuple[Problem, int]:
    """A problem and a budget at which running something again is needed, and enough."""
    case = next(case for case in tight_cases(5, 600) if case.optimum_us is not None)
    return Problem.of(case.graph), case.budget_bytes


def test_after_a_stop_none_begins() -> None:
    problem, budget_bytes = improvable()
    base, free = nothing_again(problem), every_stage(problem)
    running = Recorder()
    assert solved(problem, base, free, budget_bytes, running=running).runs is not None
    running.stop()
    assert solved(problem, base, free, budget_bytes, running=running).runs is None
    assert running.taken == [True, False]


def test_a_stop_reaches_every_solver_at_work() -> None:
    running, solvers = RunningSolvers(), [Stoppable() for _ in range(3)]
    assert all(running.add(solver) for solver in solvers)
    assert [solver.stopped for solver in solvers] == [0, 0, 0]
    running.stop()
    assert [solver.stopped for solver in solvers] == [1, 1, 1]
    late = Stoppable()
    assert not running.add(late)


def test_events_of_a_program_are_the_runs_that_may_be_chosen() -> None:
    problem, budget_bytes = improvable()
    free = every_stage(problem)
    builder = EventBuilder(problem, nothing_again(problem), free)
    program: EventProgram = builder.build(budget_bytes - problem.resident_bytes)
    assert sorted(program.run_of.values()) == sorted(
        (stage, op) for op, stages in free.items() for stage in stages
    )
    costs = [program.costs[x] for x in program.run_of]
    assert costs == [problem.cost_us[op] for _, op in program.run_of.values()]
    assert len(program.hint) == len(program.costs)
