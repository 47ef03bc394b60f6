"""The planner on captured jobs: what published systems do by hand comes out of it.

`stored/` has the jobs; `stored_jobs.py` makes them.
"""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from remat.cluster.mesh import MeshSpec, all_degrees, all_states
from remat.cluster.parts import Part, part_of
from remat.cluster.planner import ClusterPlan, ClusterSearch
from remat.graph_capture.graph import TrainingGraph
from tests.remat.cluster.stored_jobs import BLOCK_128K, FOLDER, FromFile, all_plans, stored_job


def asked_parts(search: ClusterSearch) -> FromFile:
    assert isinstance(search.parts, FromFile)
    return search.parts


@pytest.mark.parametrize("name", ["gpt_22b-16", "llama3_8b-64"])
def test_the_pruned_search_finds_all_that_the_full_one_finds(name: str) -> None:
    search = stored_job(name).search()
    near = search.run()
    full = all_plans(stored_job(name).search())
    best_us = min(plan.time_us for plan in full)
    assert near[0].time_us == best_us
    assert search.pruned > 0
    within = {plan.mesh for plan in full if plan.time_us < best_us * (1 + search.close)}
    assert {plan.mesh for plan in near} == within


def test_first_stages_compute_more_again() -> None:
    """AdaPipe, for GPT 175B in 8 stages: the first holds 8 microbatches, the last one."""
    search = stored_job("gpt_175b-64").search()
    overheads = [stage.overhead for stage in search.stages(search.run()[0])]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > 0.01
    assert overheads[-1] == 0


def test_stages_have_uneven_blocks_where_that_is_quicker() -> None:
    """Llama 8B in 8 stages: its head takes as long as two blocks, so the last stage has fewer."""
    stored = stored_job("llama3_8b-64")
    search = msgspec.structs.replace(stored, asked=MeshSpec(1, 1, 8, 1, 1)).search()
    plan = search.run()[0]
    assert plan.layers[-1] < plan.layers[1]
    assert sum(plan.layers) == search.job.layers
    assert plan.time_us < 0.95 * _evenly_us(search, plan)


def _evenly_us(search: ClusterSearch, plan: ClusterPlan) -> float:
    """The pipeline with as many blocks on each stage, by the formula."""
    d = plan.mesh.degrees
    tables = search.stage_tables(plan.mesh)
    waits = search._waits_us(d)
    blocks = search.job.layers // d.pp
    times = [float(t.times_us[blocks]) + w for t, w in zip(tables, waits, strict=True)]
    return sum(times) + (d.microbatches - 1) * max(times) + plan.time_us - plan.pipeline_us


@pytest.mark.parametrize(
    ("gb_s", "budget_gib", "shard", "keep"), [(40, 28, 64, 64), (10, 28, 64, 8), (5, 36, 8, 8)]
)
def test_states_are_held_as_the_links_between_nodes_allow(
    gb_s: float, budget_gib: int, shard: int, keep: int
) -> None:
    """Llama 8B on 8 nodes: ZeRO-3; on slower links ZeRO++'s hpZ; then HSDP, which needs room."""
    stored = stored_job("llama3_8b-64")
    links = msgspec.structs.replace(stored.cluster.links, between_gb_s=gb_s)
    cluster = msgspec.structs.replace(stored.cluster, links=links, budget_bytes=budget_gib << 30)
    search = msgspec.structs.replace(stored, cluster=cluster, asked=MeshSpec(1, 1, 1, 1)).search()
    best = search.run()[0].mesh
    assert (best.shard, best.keep) == (shard, keep)


@cache
def part_128k() -> tuple[TrainingGraph, Part]:
    graph = TrainingGraph.from_json((FOLDER / f"{BLOCK_128K}.json").read_bytes())
    return graph, part_of(graph)


def again(graph: TrainingGraph, recomputed: tuple[tuple[int, ...], ...]) -> list[str]:
    return [graph.ops[i].target for stage in recomputed for i in stage]


def test_at_128k_tokens_the_block_is_cut_at_attentions_output() -> None:
    """DistFlashAttn, LoongTrain: attention is dear there, so what is around it is made again."""
    graph, part = part_128k()
    cheap = [o for o in part.options if o.extra_us < 0.12 * part.work_us]
    assert not any("attention" in t for o in cheap for t in again(graph, o.recomputed))
    least = min(cheap, key=lambda o: o.saved_bytes)
    assert least.saved_bytes < 0.12 * part.options[0].saved_bytes
    # Of the six products whose results something reads.
    assert again(graph, least.recomputed).count("aten.mm.default") <= 3
    with_attention = [
        o for o in part.options if any("attention" in t for t in again(graph, o.recomputed))
    ]
    assert min(o.extra_us for o in with_attention) > 0.25 * part.work_us


def test_a_plan_for_1024_gpus_captures_and_evaluates_little() -> None:
    """Of Llama 70B. Captures and options are what a plan costs, so bounds come before both."""
    search = stored_job("llama3_70b-1024").search()
    assert search.run()
    degrees = list(all_degrees(search.job, search.cluster, search.asked))
    meshes = [mesh for d in degrees for mesh in all_states(d, search.cluster, search.asked)]
    captured = {(one.place, *one.degrees) for one in asked_parts(search).parts}
    solved = asked_parts(search).asked
    assert len([key for key in captured if key[0] != "first"]) <= 0.75 * ALL_PARTS
    assert len([key for key in solved if key[0] != "first"]) <= 0.45 * ALL_PARTS
    assert search.evaluated <= len(meshes) / 4


ALL_PARTS = 64
"""Blocks and heads at 4 tensor and 2 context parallel degrees and 4 sizes of a microbatch."""
