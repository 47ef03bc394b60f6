"""Repeated blocks are found, solved once and composed; every schedule passes the simulator."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.blocks import hierarchical
from remat.solver.blocks.block_options import BlockChoice, block_graph, block_options, compose
from remat.solver.blocks.hierarchical import Hierarchical
from remat.solver.blocks.repeated import Block, Reads, find_blocks, shape_of
from remat.solver.problem import Problem
from remat.solver.search import Progress
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import (
    MIB,
    Tape,
    chain,
    gpt_like,
    random_graph,
    resnet_like,
    unet_like,
)


def blocks_of(graph: TrainingGraph, group: int = 1) -> tuple[list[Block], list[int]]:
    """The blocks, and how many blocks equal each."""
    problem = Problem.of(graph)
    reads = Reads.of(problem)
    blocks = find_blocks(problem, reads, group)
    shapes = [shape_of(problem, reads, block) for block in blocks]
    counts = Counter(shapes)
    return blocks, [counts[shape] for shape in shapes]


def repeated_graph(seed: int, repetitions: int) -> TrainingGraph:
    """A random block, repeated, that also reads one value of before all repetitions."""
    source = random.Random(seed)
    plan = [
        (source.randrange(8), source.randrange(8), source.randint(1, 9), source.randint(1, 9))
        for _ in range(source.randint(4, 8))
    ]
    pins = [source.random() < 0.15 for _ in plan]
    tape = Tape("repeated")
    shared = tape.op([tape.leaf("batch", MIB)], 3 * MIB, 7)
    x = shared
    for _ in range(repetitions):
        made = [shared, x]
        for (i, j, size, cost), is_pinned in zip(plan, pins, strict=True):
            inputs = dict.fromkeys((made[-1], made[i % len(made)], made[j % len(made)]))
            no_recompute = "draws randomly" if is_pinned else ""
            made.append(
                tape.op(list(inputs), size * MIB, cost, weight_bytes=512, no_recompute=no_recompute)
            )
        x = made[-1]
    return tape.finish(tape.op([x], 512, 2))


def test_each_decoder_layer_is_one_block() -> None:
    """From its first norm to its second residual add, and that backward, down to the sum of
    the residual's and the norm's gradient."""
    graph = gpt_like(6)
    blocks, counts = blocks_of(graph)
    assert counts == [1, *[6] * 6, 1]
    assert [block.stop - block.start for block in blocks] == [1, *[21] * 6, 3]
    assert [block.back_stop - block.back_start for block in blocks] == [1, *[25] * 6, 3]
    first, last = graph.ops[blocks[1].start], graph.ops[blocks[1].stop - 1]
    assert (first.cost_us, len(first.outputs)) == (9, 3)
    assert (last.cost_us, len(last.inputs)) == (8, 2)
    assert graph.ops[blocks[1].back_start].name == f"b_{last.name}"
    assert graph.ops[blocks[1].back_stop - 1].name == f"b_{first.name}_s0"


@pytest.mark.parametrize("group", [1, 2, 4])
def test_blocks_cover_every_op_once(group: int) -> None:
    for graph in (gpt_like(5), chain(120), resnet_like(16), unet_like(3), repeated_graph(1, 5)):
        blocks, _ = blocks_of(graph, group)
        assert sorted(op for block in blocks for op in block.ops) == list(range(len(graph.ops)))


def test_groups_hold_several_repetitions() -> None:
    assert blocks_of(gpt_like(6), 2)[1] == [1, 3, 3, 3, 1]
    assert blocks_of(gpt_like(7), 4)[1] == [1, 1, 1, 1]
    assert blocks_of(gpt_like(2))[1] == [1, 2, 2, 1]


def test_repetitions_of_a_chain_and_of_residual_stages_are_found() -> None:
    assert 3 in blocks_of(chain(200))[1]
    assert Counter(blocks_of(resnet_like(32))[1])[8] == 8


def test_a_random_graph_has_no_repeated_block() -> None:
    for seed in range(5):
        assert set(blocks_of(random_graph(random.Random(seed), 60, 30))[1]) == {1}


def test_without_repeated_blocks_the_result_says_so() -> None:
    graph = unet_like(4)
    lost = solve_within(graph, peak_bytes_of(graph) // 2, "hierarchical")
    assert lost.status == "none found"
    assert "no repeated block" in lost.message
    assert lost.least_feasible_bytes == peak_bytes_of(graph)


def test_options_trade_kept_bytes_for_time() -> None:
    problem = Problem.of(gpt_like(2))
    reads = Reads.of(problem)
    block = find_blocks(problem, reads)[1]
    small = block_graph(problem, reads, block)
    options = block_options(small, 12, lambda: 60.0)
    assert options[0].extra_us == 0
    assert min(option.saved_bytes for option in options) == 9 * MIB
    frontier = sorted({(option.saved_bytes, option.extra_us) for option in options})
    for option in options:
        assert not any(other is not option and other.is_no_worse(option) for other in options)
        assert len(option.live_bytes) == len(option.recomputed) == len(small.ops) + 1
    least_us = list(itertools.accumulate((cost_us for _, cost_us in frontier), min))
    assert least_us[0] > least_us[len(least_us) // 2] > least_us[-1] == 0


def test_the_options_of_equal_blocks_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[int] = []

    def counted(graph: TrainingGraph, *rest: object) -> object:
        solved.append(len(graph.ops))
        return block_options(graph, *rest)

    monkeypatch.setattr(hierarchical, "block_options", counted)
    graph = gpt_like(8)
    assert solve_within(graph, peak_bytes_of(graph) // 2, "hierarchical").status == "feasible"
    assert solved == [3, 47, 7]


def brute_force(choices: list[list[BlockChoice]], room_bytes: int) -> float | None:
    costs_us: list[float] = []
    for picked in itertools.product(*choices):
        before = itertools.accumulate((c.saved_bytes for c in picked), initial=0)
        if all(b + c.need_bytes <= room_bytes for b, c in zip(before, picked, strict=False)):
            costs_us.append(sum(choice.extra_us for choice in picked))
    return min(costs_us, default=None)


def random_choice(source: random.Random) -> BlockChoice:
    saved_bytes = source.randint(0, 9)
    need_bytes = saved_bytes + source.randint(0, 9)
    return BlockChoice(saved_bytes, need_bytes, float(source.randint(0, 30)))


def test_composition_is_optimal_on_a_grid_of_single_bytes() -> None:
    source = random.Random(3)
    found = 0
    for _ in range(300):
        tables = [
            [random_choice(source) for _ in range(source.randint(1, 4))]
            for _ in range(source.randint(1, 5))
        ]
        room_bytes = source.randint(0, 40)
        chosen, best_us = compose(tables, room_bytes, 64), brute_force(tables, room_bytes)
        assert (chosen is None) == (best_us is None)
        if chosen is not None:
            picked = [[table[i]] for table, i in zip(tables, chosen, strict=True)]
            assert brute_force(picked, room_bytes) == best_us
            found += 1
    assert found > 100


def test_composition_on_a_coarse_grid_stays_within_the_room() -> None:
    tables = [[BlockChoice(1001, 1500, 0.0), BlockChoice(10, 1500, 5.0)]] * 6
    chosen = compose(tables, 5000, 16)
    assert chosen is not None
    picked = [[table[i]] for table, i in zip(tables, chosen, strict=True)]
    assert brute_force(picked, 5000) is not None
    assert compose(tables, 1499, 16) is None
    assert compose(tables, -1, 16) is None


@pytest.mark.parametrize(
    ("percent", "cut_overhead"),
    [pytest.param(30, 0.1730, marks=pytest.mark.slow), (50, 0.0887), (70, 0.0283)],
)
def test_many_layers_cost_no_more_than_cut_takes_on_few(percent: int, cut_overhead: float) -> None:
    """The overheads of `cut` on 12 layers, at the same parts of their peak."""
    graph = gpt_like(105)
    found = solve_within(graph, peak_bytes_of(graph) * percent // 100, "hierarchical")
    assert found.status == "feasible"
    assert found.overhead <= cut_overhead + 0.02
    assert found.lower_bound_us == graph.time_us


@pytest.mark.parametrize("percent", [90, 60, 35])
@pytest.mark.parametrize(
    "graph", [gpt_like(4), resnet_like(8), chain(120), unet_like(3)], ids=lambda graph: graph.name
)
def test_schedules_are_valid_at_several_budgets(graph: TrainingGraph, percent: int) -> None:
    budget_bytes = peak_bytes_of(graph) * percent // 100
    found = solve_within(graph, budget_bytes, "hierarchical", time_limit_s=AMPLE_S)
    if found.schedule is None:
        assert found.least_feasible_bytes > budget_bytes
    else:
        assert simulate(graph, found.schedule).peak_bytes <= budget_bytes


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(2, 5), st.integers(20, 100))
def test_schedules_are_valid_on_random_blocks(seed: int, repetitions: int, percent: int) -> None:
    graph = repeated_graph(seed, repetitions)
    budget_bytes = peak_bytes_of(graph) * percent // 100
    found = solve_within(graph, budget_bytes, "hierarchical")
    if found.schedule is not None:
        assert simulate(graph, found.schedule).peak_bytes <= budget_bytes
    elif found.least_feasible_bytes:
        again = solve_within(graph, found.least_feasible_bytes, "hierarchical")
        assert again.schedule is not None


def test_the_same_plan_twice() -> None:
    graph = gpt_like(5)
    plans = [solve_within(graph, peak_bytes_of(graph) * 2 // 5, "hierarchical") for _ in range(2)]
    assert plans[0].schedule is not None
    assert plans[0].schedule == plans[1].schedule


def test_an_interrupt_and_a_time_limit_are_no_crash() -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    graph = gpt_like(3)
    budget_bytes = peak_bytes_of(graph) // 2
    stopped = Hierarchical(progress=stop).solve(graph, budget_bytes)
    assert stopped.status == "time limit"
    assert "interrupted" in stopped.message
    assert solve_within(graph, budget_bytes, "hierarchical", time_limit_s=0).status == "time limit"


@pytest.mark.parametrize(("name", "value"), [("limits", 0), ("slots", 3)])
def test_bad_options_are_named(name: str, value: int) -> None:
    with pytest.raises(SolverError, match=f"{name} must be .* or more, not {value}"):
        solve_within(gpt_like(1), 1, "hierarchical", **{name: value})
