"""Blocks with memory below the device: options of one block, and rooms shared by all of them."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Offload
from remat.solver.blocks.block_budgets import BlockBudgets, BlockSpan, with_copied
from remat.solver.blocks.block_options import (
    BlockChoice,
    BlockOption,
    LowerBytes,
    Options,
    block_graph,
    block_options,
    compose,
)
from remat.solver.blocks.repeated import Reads, find_blocks
from remat.solver.problem import Problem
from tests.limits import AMPLE_S
from tests.links import links, with_links
from tests.solver.graphs.random_graphs import MIB, gpt_like

LIMITS = 4


def layer() -> TrainingGraph:
    """A layer of a GPT as a graph of its own."""
    problem = Problem.of(gpt_like(2))
    reads = Reads.of(problem)
    return block_graph(problem, reads, find_blocks(problem, reads)[1])


def options(gb_s: float, nvme_gb_s: float = 0.0) -> tuple[Options, Options]:
    """Without and with copies."""
    graph = layer()
    plain = block_options(graph, LIMITS, lambda: AMPLE_S)
    below = links(gb_s, nvme_gb_s=nvme_gb_s or 1.0, nvme_bytes=1 << 60 if nvme_gb_s else 0)
    if not nvme_gb_s:
        below = msgspec.structs.replace(below, write=None, read=None)
    return plain, with_copied(graph, plain, below, LIMITS, lambda: AMPLE_S)


def test_over_a_fast_link_all_that_is_kept_goes_below_at_hardly_any_cost() -> None:
    plain, found = options(1e6)
    least = min(option.saved_bytes for option in plain)
    copied = [option for option in found if option.steps]
    cheap = min(copied, key=lambda one: (one.saved_bytes, one.extra_us))
    assert cheap.saved_bytes <= least
    assert cheap.extra_us < min(o.extra_us for o in plain if o.saved_bytes == least)
    assert cheap.below_bytes[0] > 0 == cheap.below_bytes[1]


def test_over_a_slow_link_nothing_goes_below() -> None:
    plain, found = options(1e-6)
    assert not any(option.steps for option in found if option.extra_us < 1e6)
    assert set(map(id, plain)) <= set(map(id, found))


@pytest.mark.parametrize("nvme_gb_s", [0.0, 1e6])
def test_an_option_is_what_the_judge_says_of_its_steps(nvme_gb_s: float) -> None:
    for option in options(1e4, nvme_gb_s)[1]:
        if option.steps:
            assert_left_at_the_turn(option)
        if option.below_bytes[1]:
            assert option.passing_bytes > 0 == option.below_bytes[0]


def assert_left_at_the_turn(option: BlockOption) -> None:
    turn = option.steps.index(Compute("turn"))
    sent = {step.value for step in option.steps[:turn] if isinstance(step, Offload)}
    back = {step.value for step in option.steps[:turn] if isinstance(step, Fetch)}
    assert sent
    assert not back
    assert sent <= {step.value for step in option.steps[turn:] if isinstance(step, Fetch)}
    assert max(option.live_bytes) >= option.saved_bytes


def test_with_nvme_options_go_there_too() -> None:
    found = options(1e5, 1e5)[1]
    assert any(option.below_bytes[1] for option in found)


def fits(picked: tuple[BlockChoice, ...], room_bytes: int, below: LowerBytes) -> bool:
    before = itertools.accumulate((c.saved_bytes for c in picked), initial=0)
    if not all(b + c.need_bytes <= room_bytes for b, c in zip(before, picked, strict=False)):
        return False
    return all(sum(c.below_bytes[tier] for c in picked) <= below[tier] for tier in (0, 1))


def random_choice(source: random.Random) -> BlockChoice:
    saved_bytes = source.randint(0, 9)
    below = (0, 0) if source.random() < 0.4 else (source.randint(0, 6), source.randint(0, 6))
    extra_us = float(source.randint(0, 30))
    return BlockChoice(saved_bytes, saved_bytes + source.randint(0, 9), extra_us, below)


def test_what_blocks_have_below_adds_up_and_is_within_the_rooms() -> None:
    source = random.Random(3)
    found = 0
    for _ in range(400):
        tables = [
            [random_choice(source) for _ in range(source.randint(1, 4))]
            for _ in range(source.randint(1, 4))
        ]
        room_bytes, below = source.randint(0, 40), (source.randint(0, 20), source.randint(0, 20))
        fitting = [one for one in itertools.product(*tables) if fits(one, room_bytes, below)]
        chosen = compose(tables, room_bytes, 64, below)
        assert (chosen is None) == (not fitting)
        if chosen is not None:
            picked = tuple(table[i] for table, i in zip(tables, chosen, strict=True))
            assert fits(picked, room_bytes, below)
            best_us = min(sum(c.extra_us for c in one) for one in fitting)
            assert sum(c.extra_us for c in picked) == best_us
            found += 1
    assert found > 100


def test_a_coarse_grid_of_a_room_below_stays_within_it() -> None:
    tables = [[BlockChoice(0, 0, 5.0), BlockChoice(0, 0, 0.0, (1001, 0))]] * 8
    chosen = compose(tables, 10, 16, (5000, 0))
    assert chosen is not None
    assert sum(chosen) == 4
    assert compose(tables, 10, 16, (-1, 0)) is None


def spans(graph: TrainingGraph) -> list[BlockSpan]:
    problem = Problem.of(graph)
    found = find_blocks(problem, Reads.of(problem))
    sizes = [block.stop - block.start for block in found]
    common = max(set(sizes), key=sizes.count)
    return [
        (block.start, block.stop, block.back_start, block.back_stop)
        for block in found
        if block.stop - block.start == common
    ]


@pytest.mark.parametrize("host_bytes", [1 << 40, 20 * MIB])
def test_blocks_share_the_host(host_bytes: int) -> None:
    plain = gpt_like(4)
    graph = with_links(plain, links(1e6, host_bytes=host_bytes, nvme_bytes=0))
    given = BlockBudgets.of(graph, spans(graph), (), AMPLE_S)
    least_bytes = given.least_room_bytes()
    runs = given.runs(2 * least_bytes)
    assert runs is not None
    sizes = {value.name: value.size_bytes for value in graph.values}
    sent = [sizes[s.value] for run in runs for s in run if isinstance(s, Offload)]
    assert 0 < sum(sent) <= host_bytes
    without = BlockBudgets.of(plain, spans(plain), (), AMPLE_S)
    assert least_bytes <= without.least_room_bytes()


def test_what_a_block_hands_out_stays() -> None:
    graph = with_links(gpt_like(2), links(1e6))
    every = {value for op in graph.ops[: graph.n_forward] for value in op.outputs}
    given = BlockBudgets.of(graph, spans(graph), (), AMPLE_S, every)
    assert not any(option.steps for table in given.tables for option in table)
