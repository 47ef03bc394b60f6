"""The judge of pipelines, on torch's own lists of actions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from remat.cluster.mesh import Degrees
from remat.cluster.pipeline_replay import (
    PipelineAction,
    RankOrder,
    StageCosts,
    replay_pipeline,
)
from remat.cluster.replayed_plan import torch_order
from remat.cluster.stages import flights, forwards_in_flight
from remat.graph_capture.errors import ScheduleError

SEVEN = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2, "DualPipeV": 2,
}  # fmt: skip
"""torch's schedules, with their stages a rank."""
EVEN = StageCosts(1.0, 1.0, 1.0, saved_bytes=10, for_weights_bytes=4, need_bytes=3)


@pytest.mark.parametrize("name", SEVEN)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_each_schedule_of_torch_is_complete_and_takes_its_work_at_least(
    name: str, ranks: int, microbatches: int
) -> None:
    virtual_stages = SEVEN[name]
    order = torch_order(name, ranks, microbatches, virtual_stages)
    found = replay_pipeline(order, [EVEN] * ranks * virtual_stages)
    work_us = 3.0 * virtual_stages * microbatches
    assert [rank.busy_us for rank in found.ranks] == [work_us] * ranks
    assert found.time_us >= work_us
    assert 0 <= found.bubble < 1


def test_bubbles_of_even_stages_are_those_of_the_papers() -> None:
    m, ranks = 16, 4
    times = {
        name: replay_pipeline(
            torch_order(name, ranks, m, virtual_stages), [EVEN] * ranks * virtual_stages
        ).time_us / virtual_stages
        for name, virtual_stages in SEVEN.items()
    }  # fmt: skip
    assert times["GPipe"] == times["1F1B"] == 3 * (m + ranks - 1)
    assert times["Interleaved1F1B"] == 3 * (m + (ranks - 1) / 2)
    assert times["LoopedBFS"] == 3 * (m + (ranks - 1) / 2)
    assert times["InterleavedZeroBubble"] < times["Interleaved1F1B"]
    assert times["ZBVZeroBubble"] < times["Interleaved1F1B"]


@pytest.mark.parametrize("seed", range(100))
def test_the_formula_of_1f1b_is_never_below_and_at_most_7_percent_above(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(2, 8)
    m = rng.randint(stages, 6 * stages)
    costs = [
        StageCosts(forward := rng.uniform(0.9, 1.1), 2 * forward + rng.uniform(0, 0.4))
        for _ in range(stages)
    ]
    times = [cost.forward_us + cost.input_us for cost in costs]
    formula = sum(times) + (m - 1) * max(times)
    found = replay_pipeline(torch_order("1F1B", stages, m), costs).time_us
    assert formula / found + 1e-12 >= 1.0
    assert formula / found <= 1.07


@pytest.mark.parametrize(
    ("ranks", "m", "virtual_stages"), [(4, 8, 1), (4, 2, 1), (4, 8, 2), (3, 9, 3)]
)
def test_as_many_microbatches_are_in_flight_as_the_planner_counts(
    ranks: int, m: int, virtual_stages: int
) -> None:
    name = "1F1B" if virtual_stages == 1 else "Interleaved1F1B"
    if virtual_stages == 1 and m < ranks:
        with pytest.raises(ScheduleError, match="does not take 2 microbatches on 4 ranks"):
            torch_order(name, ranks, m)
        return
    found = replay_pipeline(
        torch_order(name, ranks, m, virtual_stages), [EVEN] * ranks * virtual_stages
    )
    degrees = Degrees(1, 1, ranks, 1, 1, m, virtual_stages)
    counted = [forwards_in_flight(s, degrees) for s in range(ranks)]
    assert [rank.most_open for rank in found.ranks] == counted
    assert [rank.peak_bytes for rank in found.ranks] == [10 * k + 3 for k in counted]


@pytest.mark.parametrize(("ranks", "m"), [(2, 2), (2, 6), (3, 6), (4, 4), (4, 12), (8, 16)])
@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
def test_as_many_wait_for_gradients_of_weights_as_the_planner_counts(
    ranks: int, m: int, virtual_stages: int
) -> None:
    degrees = Degrees(1, 1, ranks, 1, 1, m, virtual_stages, is_split=True)
    for rank, order in enumerate(torch_order("InterleavedZeroBubble", ranks, m, virtual_stages)):
        counted = {
            (round(one.saved * virtual_stages), round(one.waiting * virtual_stages))
            for one in flights(rank, degrees)
        }
        assert fullest_of(order) == counted


def fullest_of(order: RankOrder) -> set[tuple[int, int]]:
    """Forwards that are open, and those that wait for W: where neither was more in another."""
    opened = waiting = 0
    found = set[tuple[int, int]]()
    for together in order:
        for action in together:
            opened += action.kind == "F"
            found.add((opened, waiting))
            opened -= action.kind in ("B", "I")
            waiting += (action.kind == "I") - (action.kind == "W")
            found.add((opened, waiting))
    return {one for one in found if not any(a >= one[0] and b >= one[1] for a, b in found - {one})}


@pytest.mark.parametrize("seed", range(100))
def test_the_formula_of_interleaved_zero_bubbles_is_that_of_its_replay(seed: int) -> None:
    rng = random.Random(seed)
    ranks, virtual_stages = rng.choice([2, 4, 8]), rng.choice([2, 3, 4])
    m = ranks * rng.choice([1, 2, 4])
    f, i, w = 1.0, rng.uniform(0.5, 2.5), rng.uniform(0, 1.5)
    order = torch_order("InterleavedZeroBubble", ranks, m, virtual_stages)
    found = replay_pipeline(
        order,
        [StageCosts(f / virtual_stages, i / virtual_stages, w / virtual_stages)]
        * ranks
        * virtual_stages,
    )
    formula = m * (f + i + w) + (ranks - 1) / virtual_stages * (f + i - min(f, i, w))
    assert found.time_us == pytest.approx(formula)


def order_of(texts: list[list[str]]) -> tuple[RankOrder, ...]:
    """By rank, of actions as torch writes them: stage, kind and microbatch."""
    kinds: dict[str, Any] = {kind: kind for kind in "FBIW"}
    return tuple(
        tuple((PipelineAction(int(s), kinds[k], int(m)),) for s, k, m in rank) for rank in texts
    )


def test_gpipe_holds_all_microbatches_and_1f1b_one_for_each_stage_behind() -> None:
    def most(name: str) -> list[int]:
        found = replay_pipeline(torch_order(name, 4, 8), [EVEN] * 4)
        return [rank.most_open for rank in found.ranks]

    assert most("GPipe") == [8] * 4
    assert most("1F1B") == [4, 3, 2, 1]


def test_what_weights_need_is_live_until_their_gradients_are_done() -> None:
    order = order_of([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    found = replay_pipeline(order, [EVEN])
    assert found.ranks[0].peak_bytes == 23
    late = replay_pipeline(order, [StageCosts(1, 1, 1, 10, 10, 3)])
    assert late.ranks[0].peak_bytes == 23


def test_a_way_between_ranks_is_waited_for_and_one_on_a_rank_is_not() -> None:
    order = order_of([["0F0", "0B0"], ["1F0", "1B0"]])
    costs = [StageCosts(1, 2)] * 2
    assert replay_pipeline(order, costs, hop_us=5).time_us == 6 + 10
    on_one = order_of([["0F0", "1F0", "1B0", "0B0"]])
    assert replay_pipeline(on_one, costs, hop_us=5).time_us == 6


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([["0B0", "0F0"]], "wait forever: 0B0"),
        ([["0F0", "0F0", "0B0"]], "action 0F0 of the pipeline runs twice"),
        ([["0F0", "0B0", "0F1"]], "microbatch 1 of the pipeline has actions F on stage 0"),
        ([["0F0", "0I0"]], "has actions FI on stage 0"),
        ([["1F0", "1B0"]], r"has stages \[1\], and 1 costs"),
    ],
)
def test_an_order_that_cannot_be_is_refused(texts: list[list[str]], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        replay_pipeline(order_of(texts), [EVEN])


def test_actions_that_torch_runs_together_come_together() -> None:
    first_rank = torch_order("DualPipeV", 2, 4, 2)[0]
    both = PipelineAction(0, "F", 3), PipelineAction(3, "B", 1)
    assert both in first_rank
    assert [len(together) for together in first_rank].count(2) == 3
    assert str(both[1]) == "3B1"
