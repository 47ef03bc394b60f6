"""Sequences of lower sets: against enumeration of subsets and of sequences, and the simulator."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest

from remat.graph_capture.errors import SolverError
from remat.schedules.simulate import simulate
from remat.solver import Progress, solve_within
from remat.solver.problem import Problem
from remat.solver.segments.lower_set import (
    ForwardGraph,
    LowerSet,
    LowerSetFamily,
    SegmentTable,
    SequenceProgram,
    all_lower_sets,
    lower_set_state,
    pruned_lower_sets,
)
from remat.solver.state import store_all_state
from tests.graphs import peak_bytes_of
from tests.solver.graphs.random_graphs import chain, gpt_like, random_graph, resnet_like, unet_like

NETWORKS = {
    "unet2": functools.partial(unet_like, 2),
    "resnet4": functools.partial(resnet_like, 4),
    "gpt1": functools.partial(gpt_like, 1),
}
UNLIMITED_BYTES = 1 << 60


def forward_graphs(count: int, n_ops: int, n_forward: int) -> Iterator[ForwardGraph]:
    """Of random training graphs, those with something to run again."""
    source = random.Random(7)
    for _ in range(count):
        forward = ForwardGraph.of(Problem.of(random_graph(source, n_ops, n_forward)))
        if forward.ops:
            yield forward


def is_lower(forward: ForwardGraph, mask: int) -> bool:
    inside = [p for p in range(len(forward.ops)) if mask >> p & 1]
    return all(mask >> q & 1 for p in inside for q in forward.below[p])


def program_of(forward: ForwardGraph, masks: list[int] | None) -> SequenceProgram:
    assert masks is not None
    return SequenceProgram(SegmentTable.of(forward, masks), 10_000)


def test_all_lower_sets_are_found() -> None:
    sizes: set[int] = set()
    for forward in forward_graphs(40, 14, 9):
        everything = range(forward.everything + 1)
        expected = sorted(mask for mask in everything if is_lower(forward, mask))
        found = all_lower_sets(forward, len(expected))
        assert found is not None
        assert sorted(found) == expected
        assert found[0] == 0
        assert found[-1] == forward.everything
        assert all_lower_sets(forward, len(expected) - 1) is None
        sizes.add(len(expected))
    assert max(sizes) > 20


def test_a_chain_has_its_prefixes() -> None:
    forward = ForwardGraph.of(Problem.of(chain(6)))
    expected = [(1 << n) - 1 for n in range(len(forward.ops) + 1)]
    assert all_lower_sets(forward, 100) == expected
    assert pruned_lower_sets(forward, 100) == expected


def test_pinned_ops_are_not_run_again() -> None:
    forward = ForwardGraph.of(Problem.of(gpt_like(1)))
    assert not any(forward.problem.no_recompute[op] for op in forward.ops)
    assert all(op < forward.problem.n_forward for op in forward.ops)


@pytest.mark.parametrize("most", [2, 10, 40, 1000])
def test_the_pruned_family_holds_lower_sets(most: int) -> None:
    forward = ForwardGraph.of(Problem.of(gpt_like(3)))
    masks = pruned_lower_sets(forward, most)
    assert len(masks) <= max(most, 3)
    assert masks[0] == 0
    assert masks[-1] == forward.everything
    assert len(set(masks)) == len(masks)
    assert all(is_lower(forward, mask) for mask in masks)


def sequences(masks: list[int], everything: int, last: int = 0) -> Iterator[tuple[int, ...]]:
    """All ways from lower set `last` to `everything`."""
    if last == everything:
        yield ()
    for mask in masks:
        if last & ~mask == 0 and mask != last:
            for rest in sequences(masks, everything, mask):
                yield (mask, *rest)


def modelled(forward: ForwardGraph, sequence: tuple[int, ...]) -> tuple[float, float]:
    """Time run again and bytes of a sequence, one segment after another, from the words."""
    problem, plain = forward.problem, store_all_state(forward.problem)
    backward = range(problem.n_forward, problem.n_ops + 1)
    stays = highest = 0
    time_us = 0.0
    before: set[int] = set()
    for i, mask in enumerate(sequence):
        segment = {op for p, op in enumerate(forward.ops) if mask >> p & 1} - before
        loose = [v for op in segment for v in problem.outputs[op] if not forward.fixed[v]]
        outside = set(forward.ops) - before - segment
        crossing = {v for v in loose for op in outside if v in problem.inputs[op]}
        for t in backward:
            if set(loose) & set(problem.needs[t]):
                unread = {v for v in loose for later in backward[t - backward.start :]
                          if v in problem.needs[later]}  # fmt: skip
                own = [v for v in range(problem.n_values) if plain.kept[t, v]
                       and problem.producer[v] >= problem.n_forward]  # fmt: skip
                held = stays + sum(problem.size_bytes[v] for v in (*unread, *own))
                if t < problem.n_ops:
                    held += problem.output_bytes[t] + problem.workspace_bytes[t]
                highest = max(highest, held)
        if i < len(sequence) - 1:
            wanted = {v for v in loose for t in backward if v in problem.needs[t]} - crossing
            time_us += again_us(problem, segment, crossing, wanted)
        stays += sum(problem.size_bytes[v] for v in crossing)
        before |= segment
    return time_us, highest + forward.always_bytes()


def again_us(problem: Problem, segment: set[int], crossing: set[int], wanted: set[int]) -> float:
    """Time of all ops of the segment behind `wanted`."""
    again: set[int] = set()
    while wanted:
        op = problem.producer[wanted.pop()]
        if op in segment and op not in again:
            again.add(op)
            wanted |= set(problem.inputs[op]) - crossing
            wanted = {v for v in wanted if not problem.no_recompute[problem.producer[v]]}
            wanted -= problem.held
    return sum(problem.cost_us[op] for op in again)


def test_the_program_equals_all_sequences() -> None:
    compared = 0
    for forward in forward_graphs(60, 11, 5):
        masks = all_lower_sets(forward, 100)
        assert masks is not None
        program = program_of(forward, masks)
        figures = [modelled(forward, seq) for seq in sequences(masks, forward.everything)]
        for limit_bytes in sorted({held for _, held in figures}):
            found = program.fastest(limit_bytes)
            assert found is not None
            assert found[0] == min(us for us, held in figures if held <= limit_bytes)
            assert modelled(forward, found[1]) <= (found[0], limit_bytes)
            compared += found[0] > 0
        assert program.fastest(min(held for _, held in figures) - 1) is None
        assert not program.was_thinned
    assert compared > 50


@pytest.mark.parametrize("name", NETWORKS)
def test_the_programs_time_is_the_schedules(name: str) -> None:
    problem = Problem.of(NETWORKS[name]())
    forward = ForwardGraph.of(problem)
    exact = program_of(forward, all_lower_sets(forward, 1000))
    pruned = program_of(forward, pruned_lower_sets(forward, 1000))
    top = exact.table.needed_bytes[-1, 0]
    for part in (1.0, 0.9, 0.8, 0.7, 0.6):
        found, other = exact.fastest(part * top), pruned.fastest(part * top)
        if found is not None:
            state = lower_set_state(forward, found[1])
            assert state.cost_us == pytest.approx(found[0])
            simulate(problem.graph, state.schedule())
            assert other is None or other[0] >= found[0] - 1e-9
    assert exact.fastest(top) == (0.0, (forward.everything,))


def test_schedules_of_random_sequences_are_valid() -> None:
    source = random.Random(3)
    for forward in forward_graphs(60, 14, 8):
        masks = all_lower_sets(forward, 1000)
        assert masks is not None
        chosen = [0]
        while chosen[-1] != forward.everything:
            larger = [m for m in masks if chosen[-1] & ~m == 0 and m != chosen[-1]]
            chosen.append(source.choice(larger))
        state = lower_set_state(forward, chosen[1:])
        simulate(forward.problem.graph, state.schedule())
        assert state.cost_us <= modelled(forward, tuple(chosen[1:]))[0] + 1e-9


@pytest.mark.parametrize("family", ["auto", "approximate"])
@pytest.mark.parametrize("percent", [80, 60, 45])
@pytest.mark.parametrize("name", NETWORKS)
def test_results_are_judged(name: str, percent: int, family: LowerSetFamily) -> None:
    graph = NETWORKS[name]()
    budget_bytes = peak_bytes_of(graph) * percent // 100
    result = LowerSet(family=family).solve(graph, budget_bytes)
    if result.schedule is None:
        assert result.status == "none found"
        named = LowerSet(family=family).solve(graph, result.least_feasible_bytes)
        assert named.peak_bytes <= result.least_feasible_bytes
        assert named.schedule is not None
    else:
        assert simulate(graph, result.schedule).peak_bytes == result.peak_bytes <= budget_bytes
        assert max(result.schedule.computations().values()) >= 2
    if percent == 80 and name != "resnet4":  # whose first segment needs more when it comes back
        assert result.schedule is not None


@pytest.mark.parametrize("percent", range(30, 101, 5))
def test_never_worse_than_chen_on_a_chain(percent: int) -> None:
    graph = chain(16)
    budget_bytes = peak_bytes_of(graph) * percent // 100
    other = solve_within(graph, budget_bytes, "chen_sqrt")
    result = solve_within(graph, budget_bytes, "lower_set")
    if other.schedule is not None:
        assert result.schedule is not None
        assert result.time_us <= other.time_us


def test_filling_never_costs_time() -> None:
    graph = gpt_like(2)
    budget_bytes = peak_bytes_of(graph) * 7 // 10
    bare = LowerSet(fill=False).solve(graph, budget_bytes)
    filled = LowerSet().solve(graph, budget_bytes)
    assert filled.schedule is not None
    assert filled.time_us <= bare.time_us


def test_too_many_lower_sets_are_said() -> None:
    graph = gpt_like(1)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    result = LowerSet(family="exact", most_lower_sets=10).solve(graph, budget_bytes)
    assert "approximate family, since there are more than 10 in all" in result.message
    assert "over all 430 lower sets" in LowerSet().solve(graph, budget_bytes).message
    assert "at most 2 labels" in LowerSet(labels=2).solve(graph, budget_bytes).message


def test_an_interrupt_keeps_the_best() -> None:
    heard: list[Progress] = []

    def listener(progress: Progress) -> None:
        heard.append(progress)
        if progress.best_overhead is not None:
            raise KeyboardInterrupt

    graph = unet_like(2)
    result = LowerSet(progress=listener).solve(graph, peak_bytes_of(graph) * 8 // 10)
    assert result.schedule is not None
    assert "interrupted" in result.message
    assert result.status == "time limit"


def test_no_time_is_a_result() -> None:
    graph = unet_like(2)
    result = LowerSet(time_limit_s=0.0).solve(graph, peak_bytes_of(graph) * 8 // 10)
    assert result.status == "time limit"
    assert result.schedule is None


def test_bad_options_are_named() -> None:
    with pytest.raises(SolverError, match="unknown family 'all'; there are auto, exact, approx"):
        LowerSet(family="all")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(SolverError, match="most_lower_sets must be 2 or more, not 1"):
        LowerSet(most_lower_sets=1)
    with pytest.raises(SolverError, match="labels must be 2 or more, not 0"):
        LowerSet(labels=0)
