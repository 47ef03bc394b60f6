"""The search over meshes: pruned finds what the full one finds, and states are held as they say."""

from __future__ import annotations

import math

import msgspec
import pytest

from remat.cluster.mesh import (
    SCHEDULES,
    Mesh,
    MeshSpec,
    all_degrees,
    all_states,
    even_layers,
    places_of_blocks,
    ring_ranks,
)
from remat.cluster.parts import ChainPosition, Part
from remat.cluster.pipeline_replay import FOR_WEIGHTS
from remat.cluster.planner import ClusterPlan, ClusterSearch
from tests.remat.cluster.made_jobs import MadeParts, made_cluster, made_job


def search_of(
    gpus: int,
    layers: int = 32,
    batch: int = 64,
    budget_gib: float = 72,
    asked: MeshSpec | None = None,
) -> ClusterSearch:
    job, cluster = made_job(layers, batch), made_cluster(gpus, budget_gib)
    return ClusterSearch(job, cluster, MadeParts(job, cluster), asked or MeshSpec())


def all_plans(search: ClusterSearch) -> list[ClusterPlan]:
    """Every mesh evaluated, none pruned."""
    found = [
        search.evaluate(mesh)
        for degrees in all_degrees(search.job, search.cluster, search.asked)
        for mesh in all_states(degrees, search.cluster, search.asked)
    ]
    return [plan for plan in found if plan is not None]


@pytest.mark.parametrize(
    ("heads", "tp", "cp", "ring"),
    [
        (((32, 8),), 1, 64, 2),  # a head of keys goes to 4 ranks
        (((32, 8),), 4, 64, 8),
        (((32, 8),), 1, 16, 1),
        (((12, 12),), 1, 8, 2),
        (((12, 12), (16, 4)), 1, 16, 4),
        (((1, 1),), 1, 4, 4),
        ((), 1, 4, 1),
    ],
)
def test_as_many_ranks_share_heads_as_can(
    heads: tuple[tuple[int, int], ...], tp: int, cp: int, ring: int
) -> None:
    assert ring_ranks(heads, tp, cp) == ring


@pytest.mark.parametrize(
    ("gpus", "layers", "batch", "budget_gib"), [(16, 32, 64, 40), (64, 48, 128, 20)]
)
def test_the_pruned_search_finds_all_that_the_full_one_finds(
    gpus: int, layers: int, batch: int, budget_gib: float
) -> None:
    search = search_of(gpus, layers, batch, budget_gib)
    near = search.run()
    full = all_plans(search_of(gpus, layers, batch, budget_gib))
    best_us = min(plan.time_us for plan in full)
    assert near[0].time_us == best_us
    assert search.pruned > 0
    within = {plan.mesh for plan in full if plan.time_us < best_us * 1.05}
    assert {plan.mesh for plan in near} == within


def test_no_plan_beats_its_bound() -> None:
    search = search_of(32)
    for plan in all_plans(search):
        degrees = plan.mesh.degrees
        assert search._least_products_us(degrees) <= search._work_us(degrees)
        assert search._work_us(degrees) <= plan.time_us


def test_two_searches_find_the_same() -> None:
    assert search_of(32).run() == search_of(32).run()


def test_each_stage_is_within_the_budget() -> None:
    search = search_of(64, 48, 128, 20)
    for plan in search.run():
        stages = search.stages(plan)
        assert sum(stage.blocks for stage in stages) == 48
        assert all(stage.peak_bytes <= search.cluster.budget_bytes for stage in stages)


def test_what_the_head_needs_is_there_beside_all_that_blocks_save() -> None:
    """The head runs while every block of its microbatch waits for backward."""
    search = search_of(16, asked=MeshSpec(tp=1, cp=1, pp=1, microbatch=1))
    before = search.run()[0].time_us
    made = search.parts.part

    def with_large_head(place: ChainPosition, tp: int, cp: int, microbatch: int) -> Part:
        part = made(place, tp, cp, microbatch)
        if place != "last":
            return part
        large = msgspec.structs.replace(part.options[0], need_bytes=40 << 30)
        return msgspec.structs.replace(part, options=(large,))

    after = search_of(16, asked=MeshSpec(tp=1, cp=1, pp=1, microbatch=1))
    after.parts.part = with_large_head  # type: ignore[method-assign]
    plan = after.run()[0]
    assert plan.time_us > before
    assert after.stages(plan)[0].peak_bytes <= after.cluster.budget_bytes


def test_first_stages_compute_more_again_and_are_not_longer() -> None:
    """More microbatches are in flight there, so their blocks have less room."""
    search = search_of(64, 48, 64, 20, MeshSpec(tp=2, cp=1, pp=8, microbatch=1, virtual_stages=1))
    plan = search.run()[0]
    stages = search.stages(plan)
    assert stages[0].overhead > stages[6].overhead
    assert plan.layers[1] <= plan.layers[6]
    assert len(set(plan.layers)) > 1


def on_slow_links(gb_s: float, batch: int) -> Mesh:
    """The best mesh of FSDP alone, on 8 nodes with links of that rate between."""
    search = search_of(64, 32, batch, 40, MeshSpec(tp=1, cp=1, pp=1, microbatch=1))
    links = msgspec.structs.replace(search.cluster.links, between_gb_s=gb_s)
    search.cluster = msgspec.structs.replace(search.cluster, links=links)
    return search.run()[0].mesh


def test_parameters_kept_over_a_node_win_where_links_between_are_slow() -> None:
    """ZeRO++'s hpZ: gathered again inside the node alone."""
    best = on_slow_links(20, 64)
    assert (best.shard, best.keep) == (64, 8)


def test_states_split_over_a_node_win_with_many_microbatches_on_slower_links() -> None:
    """HSDP: each node has all states, and nodes are replicas."""
    best = on_slow_links(5, 256)
    assert (best.shard, best.replicas) == (8, 8)


def test_more_room_is_never_slower() -> None:
    times = [
        min((p.time_us for p in search_of(32, budget_gib=gib).run()), default=math.inf)
        for gib in (10, 16, 24, 40, 72)
    ]
    assert times == sorted(times, reverse=True)


def test_nothing_fits_is_an_empty_list() -> None:
    assert search_of(8, budget_gib=1).run() == []


def test_a_zero_bubble_is_shorter_and_holds_what_waits_for_weights() -> None:
    found: dict[str, ClusterPlan] = {}
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        asked = MeshSpec(tp=1, cp=1, pp=8, microbatch=1, virtual_stages=2, schedule=name)
        search = search_of(64, 48, 64, 40, asked)
        found[name] = search.run()[0]
        assert found[name].mesh.degrees.schedule == name
        stages = search.stages(found[name])
        assert all((FOR_WEIGHTS in s.held_bytes) == (name == SCHEDULES[2]) for s in stages)
        assert all(stage.peak_bytes <= search.cluster.budget_bytes for stage in stages)
    assert found["InterleavedZeroBubble"].time_us < found["Interleaved1F1B"].time_us


def test_a_schedule_that_is_asked_for_is_the_only_one() -> None:
    for name in SCHEDULES:
        search = search_of(16, asked=MeshSpec(pp=4, schedule=name))
        degrees = list(all_degrees(search.job, search.cluster, search.asked))
        assert {d.schedule for d in degrees} == {name}
        assert {d.virtual_stages == 1 for d in degrees} == {name == "1F1B"}
        assert {d.tp == 1 for d in degrees if d.is_split} <= {True}
        search = search_of(16, asked=MeshSpec(schedule=name))
        assert {d.schedule for d in all_degrees(search.job, search.cluster, search.asked)} == {name}


def test_without_overlap_a_step_is_longer() -> None:
    search = search_of(64, asked=MeshSpec(tp=1, cp=1, pp=1))
    plan = search.run()[0]
    assert search.overlapped_us(plan) > 0


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (112, {1, 2, 7, 14}),
        (48, {1, 2, 3, 6}),
        (128, {1, 2, 4, 8}),
        (144, {1, 2, 3, 6}),
        (4, set()),
    ],
)
def test_microbatches_divide_the_batch_of_a_rank(batch: int, sizes: set[int]) -> None:
    cluster, asked = made_cluster(8), MeshSpec(tp=1, cp=1, pp=1)
    assert {d.microbatch for d in all_degrees(made_job(8, batch), cluster, asked)} == sizes


def test_tied_weights_leave_one_stage() -> None:
    search = search_of(16)
    search.job = msgspec.structs.replace(search.job, unstaged="untie tok.weight")
    assert {d.pp for d in all_degrees(search.job, search.cluster, MeshSpec())} == {1}


def test_virtual_stages_go_round_the_ranks_and_the_ends_may_lack_a_block() -> None:
    assert places_of_blocks((4, 4), 2) == [
        [range(2), range(4, 6)], [range(2, 4), range(6, 8)]
    ]  # fmt: skip
    layers = even_layers(10, 2, 3)
    assert layers == (5, 5)
    assert places_of_blocks(layers, 3) == [
        [range(1), range(3, 5), range(7, 9)], [range(1, 3), range(5, 7), range(9, 10)]
    ]  # fmt: skip
    assert places_of_blocks((2, 3, 1), 1) == [[range(2)], [range(2, 5)], [range(5, 6)]]
    assert even_layers(9, 2, 3) is None


def test_pipelines_hold_parameters_and_gradients_whole() -> None:
    search = search_of(16)
    degrees = next(d for d in all_degrees(search.job, search.cluster, MeshSpec(pp=2)))
    meshes: list[Mesh] = list(all_states(degrees, search.cluster, MeshSpec()))
    assert all(mesh.keep == 1 and not mesh.reduce_each for mesh in meshes)
