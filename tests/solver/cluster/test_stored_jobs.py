"""The planner on captured jobs: what published systems do by hand comes out of it.

`stored/` has the jobs; `stored_jobs.py` makes them.
"""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.solver.cluster.mesh import Asked, all_degrees, all_states
from remat.solver.cluster.parts import Part, part_of
from remat.solver.cluster.planner import ClusterPlan, ClusterSearch
from tests.solver.cluster.stored_jobs import BLOCK_128K, FOLDER, FromFile, all_plans, stored_job


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
    search = msgspec.structs.replace(stored, asked=Asked(1, 1, 8, 1, 1)).search()
    plan = search.run()[0]
    assert plan.layers[-1] < plan.layers[1]
    assert sum(plan.layers) == search.job.layers
    assert plan.time_us < 0.95 * _evenly_us(search, plan)


def _evenly_us(search: ClusterSearch, plan: ClusterPlan) -> float:
    """The pipeline with as many blocks on each stage, by the formula."""
    d = plan.mesh.degrees
    tables = search.stage_tables(plan.mesh)
    waits = search._waits_us(plan.mesh)
    blocks = search.job.layers // d.pp
    times = [float(t.times_us[blocks]) + w for t, w in zip(tables, waits, strict=True)]
    return sum(times) + (d.microbatches - 1) * max(times) + plan.time_us - plan.pipeline_us


def test_parameters_are_kept_over_a_node_where_links_between_are_slow() -> None:
    """ZeRO++'s hpZ, for Llama 8B on 8 nodes."""
    kept = {gb_s: _kept_on(gb_s) for gb_s in (400.0, 20.0)}
    assert kept[20.0] == (64, 8)
    assert kept[400.0] != (64, 8)


def _kept_on(between_gb_s: float) -> tuple[int, int]:
    stored = stored_job("llama3_8b-64")
    links = msgspec.structs.replace(stored.cluster.links, between_gb_s=between_gb_s)
    # With whole parameters and gradients there would be nothing to gather again.
    cluster = msgspec.structs.replace(stored.cluster, links=links, budget_bytes=28 << 30)
    search = msgspec.structs.replace(stored, cluster=cluster, asked=Asked(1, 1, 1, 1)).search()
    best = search.run()[0].mesh
    return best.shard, best.keep


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
    assert again(graph, least.recomputed).count("aten.mm.default") <= 2
    with_attention = [
        o for o in part.options if any("attention" in t for t in again(graph, o.recomputed))
    ]
    assert min(o.extra_us for o in with_attention) > 0.25 * part.work_us


def test_a_plan_for_1024_gpus_captures_and_evaluates_little() -> None:
    """Of Llama 70B: captures and options are what a plan costs, so most are ruled out before."""
    search = stored_job("llama3_70b-1024").search()
    assert search.run()
    solved = asked_parts(search).asked
    degrees = list(all_degrees(search.job, search.cluster, search.asked))
    meshes = [mesh for d in degrees for mesh in all_states(d, search.cluster, search.asked)]
    assert len(asked_parts(search).parts) <= MOST_CAPTURED
    assert len(solved) <= MOST_SOLVED
    assert search.evaluated < len(meshes) / 3


MOST_CAPTURED, MOST_SOLVED = 60, 40
"""Parts with their ends, of 96 that there are: two to three seconds each on one core."""
