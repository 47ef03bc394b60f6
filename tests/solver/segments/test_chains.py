"""Chains: published counts, an independent replay, brute force, and real schedules of them."""

from __future__ import annotations

import functools
import itertools
import json
import random
from math import comb
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Fetch, Offload
from remat.schedules.simulate import simulate
from remat.solver import Result, make_solver, solve_within
from remat.solver.problem import Problem
from remat.solver.segments.chain import (
    ChainAction,
    ChainRun,
    ChainStage,
    StageRuns,
    find_chain,
    ops_of_actions,
)
from remat.solver.segments.chen_sqrt import articulation_points, kept_values
from remat.solver.segments.revolve import (
    binomial_actions,
    least_read,
    mixed_actions,
    mixed_table,
    stored_states,
)
from remat.solver.segments.rotor import solve_rotor
from tests.links import with_links
from tests.paths import ROOT
from tests.solver.graphs.captured_order import keeps_order
from tests.solver.graphs.random_graphs import (
    MIB,
    Tape,
    chain,
    gpt_like,
    resnet_like,
    training_graphs,
    unet_like,
)

BENCH = ROOT.parent / "shared" / "bench"


def bench(name: str) -> dict[str, Any]:
    path = BENCH / name
    if not path.exists():
        pytest.skip(f"reference data {path} is not here")
    return json.loads(path.read_text())


def forward_runs(actions: list[ChainAction], stages: int, slots: int, mixed: bool) -> int:
    """Replay `actions` on an abstract chain, checking every rule; count the forward runs."""
    states, data, at, left, count = set[int](), set[int](), 0, stages, 0
    for kind, stage in actions:
        if kind == "store":
            assert at == stage
            states.add(stage)
        elif kind == "discard":
            states.remove(stage)
            at = stage
        elif kind == "backward":
            assert stage == left - 1
            data.remove(stage)
            left = stage
        else:
            assert stage == at or stage in states
            assert stage < left
            at, count = stage + 1, count + 1
            if kind == "save":
                data.add(stage)
        # What the next backward reads is working memory, all else is in slots.
        waiting = data - {left - 1}
        assert len(states) + len(waiting) <= slots
        assert mixed or not waiting
    assert (left, states, data) == (0, set(), set())
    return count


def optimal_steps(stages: int, slots: int) -> int:
    """Fewest forward runs with `slots` states stored, by the closed formula."""
    times = next(t for t in itertools.count() if comb(slots + t, slots) >= stages)
    return stages + times * stages - (comb(slots + times, times - 1) if times else 0)


def optimal_steps_mixed(stages: int, slots: int) -> int:
    """Fewest forward runs where a slot may hold what backward reads, by the solver's table."""
    return int(mixed_table(stages, min(slots, stages))[0][-1, stages])


def test_counts_and_schedules_equal_the_published_ones() -> None:
    for row in bench("chain_revolve_table.json")["rows"]:
        n, s = row["n"], row["s"]
        assert optimal_steps(n, s) == row["optimal_steps_binomial"]
        assert optimal_steps(n, s) == n + row["closed_form_tn_minus_C"]
        assert optimal_steps_mixed(n, s) == row["optimal_steps_mixed"]
        assert forward_runs(binomial_actions(n, s), n, s, False) == row["optimal_steps_binomial"]
        assert forward_runs(mixed_actions(n, s), n, s, True) == row["optimal_steps_mixed"]


@given(st.integers(1, 60), st.integers(1, 12))
def test_binomial_schedules_reach_the_closed_formula(stages: int, slots: int) -> None:
    times = next(t for t in itertools.count() if comb(slots + t, slots) >= stages)
    formula = times * stages - (comb(slots + times, times - 1) if times else 0)
    assert forward_runs(binomial_actions(stages, slots), stages, slots, False) == stages + formula
    mixed = forward_runs(mixed_actions(stages, slots), stages, slots, True)
    assert mixed == optimal_steps_mixed(stages, slots) <= stages + formula


@functools.cache
def fewest_runs(stages: int, slots: int) -> int:
    """By trying every place of the next checkpoint."""
    if stages == 1:
        return 1
    if slots == 1:
        return stages * (stages + 1) // 2
    return min(
        k + fewest_runs(k, slots) + fewest_runs(stages - k, slots - 1) for k in range(1, stages)
    )


def test_the_formula_is_the_least_over_all_places_of_checkpoints() -> None:
    for stages, slots in itertools.product(range(1, 25), range(1, 7)):
        assert optimal_steps(stages, slots) == fewest_runs(stages, slots)


def test_states_read_least_are_those_on_disk() -> None:
    actions = binomial_actions(20, 4)
    states = stored_states(actions)
    assert max(state.slot for state in states) == 3
    restarts = sum(
        after.kind in ("forward", "save") and before.kind in ("backward", "discard")
        for before, after in itertools.pairwise(actions)
    )
    assert sum(state.reads for state in states) == restarts
    on_disk = {state.slot for state in least_read(states, 2)}
    accesses = {
        slot: sum(1 + state.reads for state in states if state.slot == slot) for slot in range(1, 4)
    }
    assert len(on_disk) == 2
    assert max(accesses[slot] for slot in on_disk) <= min(
        accesses[slot] for slot in accesses if slot not in on_disk
    )


def rotor_model(instance: dict[str, Any]) -> list[ChainStage]:
    """As rotor counts: the loss is a stage of no cost; beside what is saved, backward holds the
    gradient of its stage's input; gradients that wait while forward runs again are not counted.
    """
    columns = zip(
        (*instance["fw"], 0), (*instance["bw"], 0), instance["cw"], (*instance["cw"][1:], 0),
        (*instance["cbw"][1:], 0), strict=True,
    )  # fmt: skip
    found = list[ChainStage]()
    for forward_us, backward_us, entry, result, saved in columns:
        drop, save = (ChainRun((), float(forward_us), peak) for peak in (result, saved))
        runs, peak = StageRuns(drop, save, save), entry + saved
        found.append(ChainStage(-1, entry, saved, 0, runs, runs, (), float(backward_us), peak))
    return found


def test_rotor_equals_the_published_program_at_every_memory() -> None:
    for instance in bench("chain_rotor.json")["chains"]:
        expected = instance["breakpoints_mem_cost"]
        limit = expected[-1][0]
        table = solve_rotor(rotor_model(instance), limit, limit)
        assert table is not None
        assert table.slot_bytes == 1
        whole_us = table.whole_us
        found = [
            [m, whole_us[m]]
            for m in range(limit + 1)
            if np.isfinite(whole_us[m]) and (m == 0 or whole_us[m] < whole_us[m - 1])
        ]
        assert found == expected


@given(st.integers(0, 1 << 30), st.integers(2, 9), st.integers(2, 200))
@settings(max_examples=40, deadline=None)
def test_rotor_actions_take_the_time_that_the_table_says(seed: int, stages: int, m: int) -> None:
    source = random.Random(seed)
    sizes = [source.randint(0, 9) for _ in range(stages + 1)]
    instance = {
        "fw": [source.randint(1, 9) for _ in range(stages)],
        "bw": [source.randint(1, 9) for _ in range(stages)],
        "cw": sizes,
        "cbw": [0, *(size + source.randint(0, 9) for size in sizes[1:])],
    }
    table = solve_rotor(rotor_model(instance), m, m)
    assert table is not None
    slots = table.whole_us.size - 1
    if not np.isfinite(table.whole_us[slots]):
        return
    actions = table.actions(slots)
    taken = sum(
        (*(instance["bw"] if kind == "backward" else instance["fw"]), 0)[stage]
        for kind, stage in actions
    )
    assert taken == table.whole_us[slots]
    assert [a.stage for a in actions if a.kind == "backward"] == list(range(stages, -1, -1))


def hand_chain(seed: int, length: int) -> TrainingGraph:
    """A heterogeneous chain; some stages have side outputs, or save their result."""
    source, tape = random.Random(seed), Tape("random chain")
    x = tape.leaf("x", 8)
    for _ in range(length):
        tape_saves = source.choice([None, None, [""], []])
        extra = (source.randint(1, 9),) if source.random() < 0.3 else ()
        size_bytes, cost_us = source.randint(1, 20), source.randint(1, 20)
        weight_bytes = source.choice([0, 1, 3])
        x = tape.op(
            [x], size_bytes, cost_us, saves=tape_saves, weight_bytes=weight_bytes, extra=extra
        )
    return tape.finish(tape.op([x], 1, 1))


def judged_time(result: Result, graph: TrainingGraph, budget_bytes: int) -> float:
    if result.schedule is None:
        return float("inf")
    found = simulate(graph, result.schedule)
    assert found.peak_bytes == result.peak_bytes <= budget_bytes
    return found.time_us


@pytest.mark.slow
def test_rotor_is_hardly_ever_worse_than_segments() -> None:
    """Its times and bytes are a model, so one chain in a hundred may go the other way."""
    lost, feasible = 0, 0
    for seed in range(100):
        graph = hand_chain(seed, 3 + seed % 14)
        budget_bytes = (
            solve_within(graph, 1 << 60, "store_all").peak_bytes * (35 + seed * 7 % 60) // 100
        )
        rotor_us, *others_us = (
            judged_time(solve_within(graph, budget_bytes, name), graph, budget_bytes)
            for name in ("rotor", "chen_sqrt", "chen_greedy")
        )
        feasible += rotor_us < float("inf")
        lost += rotor_us > min(others_us) + 1e-9
    assert feasible >= 40
    assert lost <= 1


@pytest.mark.parametrize("length", [8, 20, 30])
def test_rotor_is_never_worse_than_segments_on_mixed_chains(length: int) -> None:
    graph = chain(length)
    peak_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
    for percent in (90, 70, 50, 40, 30):
        budget_bytes = peak_bytes * percent // 100
        rotor_us, *others_us = (
            judged_time(solve_within(graph, budget_bytes, name), graph, budget_bytes)
            for name in ("rotor", "revolve", "chen_sqrt", "chen_greedy")
        )
        assert rotor_us <= min(others_us)


def test_rotor_proves_nothing_but_meets_the_optimum_of_a_small_chain() -> None:
    graph = chain(8)
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes * 60 // 100
    best = solve_within(graph, budget_bytes, "cut", gap=0.0)
    found = solve_within(graph, budget_bytes, "rotor")
    assert best.status == "optimal"
    assert found.time_us == best.time_us
    assert found.lower_bound_us == graph.time_us


@pytest.mark.parametrize(
    ("graph", "stages"),
    [(chain(12), 13), (gpt_like(3), 10), (resnet_like(8), 23), (unet_like(2), 14)],
)
def test_stages_cover_forward_and_backward_in_order(graph: TrainingGraph, stages: int) -> None:
    problem = Problem.of(graph)
    found = find_chain(problem)
    assert len(found.stages) == stages
    forward = [op for stage in found.stages for op in stage.first.save.ops]
    backward = [op for stage in reversed(found.stages) for op in stage.backward]
    assert forward + backward == list(range(problem.n_ops))
    for slots in (1, 2, stages):
        for actions in (binomial_actions(stages, slots), mixed_actions(stages, slots)):
            sequence = [op for run in ops_of_actions(found, actions) for op in run]
            assert keeps_order(problem, sequence)


def is_articulation(problem: Problem, kept: bytearray, end: int, entry: int) -> bool:
    """Whether taking `entry` out leaves no path from ops up to `end` to later ones."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(problem.n_forward))
    for op in range(problem.n_forward):
        for v in problem.inputs[op]:
            if not kept[v] and v != entry:
                graph.add_edge(problem.producer[v], op)
    reached = set[int]().union(*(nx.descendants(graph, op) for op in range(end + 1)))
    return all(op <= end for op in reached)


@given(training_graphs(max_ops=20))
@settings(max_examples=60, deadline=None)
def test_places_are_articulation_points(graph: TrainingGraph) -> None:
    problem = Problem.of(graph)
    kept = kept_values(problem)
    places = articulation_points(problem, kept)
    assert all(is_articulation(problem, kept, *place) for place in places)
    for name in ("rotor", "revolve", "chen_greedy"):
        peak_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
        for percent in (90, 60):
            budget_bytes = peak_bytes * percent // 100
            judged_time(solve_within(graph, budget_bytes, name), graph, budget_bytes)


def skips() -> TrainingGraph:
    """Every op reads the two before it, so that no single value separates forward."""
    tape = Tape("skips")
    a = tape.op([tape.leaf("x", MIB)], MIB, 5, extra=(MIB,))
    b = f"{a}_x0"
    for _ in range(8):
        a, b = b, tape.op([a, b], MIB, 5, extra=(4 * MIB,))
    return tape.finish(tape.op([a, b], MIB, 5))


@pytest.mark.parametrize("name", ["rotor", "revolve"])
def test_a_graph_that_is_no_chain_is_refused_in_words(name: str) -> None:
    graph = skips()
    peak_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
    assert solve_within(graph, peak_bytes, name).status == "optimal"
    lost = solve_within(graph, peak_bytes - 1, name)
    assert lost.status == "none found"
    assert "no articulation point between f0 and f9" in lost.message
    assert lost.least_feasible_bytes == peak_bytes


def test_greedy_takes_all_ops_where_there_are_no_articulation_points() -> None:
    graph = skips()
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes - 1
    assert solve_within(graph, budget_bytes, "chen_greedy").schedule is not None
    narrow = solve_within(graph, budget_bytes, "chen_greedy", points="articulation")
    assert narrow.schedule is None
    assert "try points='all'" in narrow.message


@pytest.mark.parametrize("mixed", [False, True])
def test_states_on_disk_leave_room(mixed: bool) -> None:
    graph = with_links(chain(24))
    least = solve_within(graph, 0, "revolve", slots=5, mixed=mixed)
    on_disk = solve_within(graph, 0, "revolve", slots=5, mixed=mixed, disk_slots=2)
    assert on_disk.least_feasible_bytes <= least.least_feasible_bytes
    found = solve_within(
        graph, least.least_feasible_bytes, "revolve", slots=5, mixed=mixed, disk_slots=2
    )
    assert found.schedule is not None
    judged = simulate(graph, found.schedule)
    assert judged.moved_bytes["d2h"] == judged.moved_bytes["h2d"] > 0
    assert found.time_us == judged.time_us > sum(judged.busy_us[at] for at in ("device",))
    moved = [step.value for step in found.schedule.steps if isinstance(step, Offload)]
    fetched = [step.value for step in found.schedule.steps if isinstance(step, Fetch)]
    assert sorted(moved) == sorted(fetched)
    assert moved


def test_the_least_budget_that_rotor_names_is_feasible() -> None:
    for graph in (chain(20), gpt_like(2), resnet_like(8)):
        least_bytes = solve_within(graph, 0, "rotor").least_feasible_bytes
        found = solve_within(graph, least_bytes, "rotor")
        assert found.schedule is not None
        assert found.peak_bytes <= least_bytes


def test_a_long_chain_is_cut_coarser() -> None:
    problem = Problem.of(chain(200))
    found = find_chain(problem, 30)
    assert 20 <= len(found.stages) <= 30
    whole = find_chain(problem)
    assert len(whole.stages) == 201
    budget_bytes = solve_within(problem.graph, 1 << 60, "store_all").peak_bytes // 2
    result = solve_within(problem.graph, budget_bytes, "rotor", stages=30)
    judged_time(result, problem.graph, budget_bytes)
    assert result.overhead < 0.2


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("rotor", {"slots": 0}, "slots must be 1 or more, not 0"),
        ("rotor", {"stages": 1}, "stages must be 2 or more, not 1"),
        ("revolve", {"slots": -1}, "slots must be 0 .* or more, not -1"),
        ("revolve", {"disk_slots": -2}, "disk_slots must be 0 or more, not -2"),
        ("chen_greedy", {"points": "some"}, "points must be one of auto, articulation, all"),
        ("chen_greedy", {"sizes": 0}, "sizes must be 1 or more, not 0"),
    ],
)
def test_bad_options_are_named(name: str, option: dict[str, Any], text: str) -> None:
    with pytest.raises(SolverError, match=text):
        make_solver(name, **option)


def test_counts_of_impossible_chains_are_refused() -> None:
    with pytest.raises(SolverError, match="not 3 stages and 0 slots"):
        binomial_actions(3, 0)
    with pytest.raises(SolverError, match="not 0 stages and 1 slots"):
        binomial_actions(0, 1)
