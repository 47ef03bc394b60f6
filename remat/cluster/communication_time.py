"""Times of what a mesh adds to its parts: gathers, reductions, waits between stages, updates.

FSDP2 gathers the next block beside the one that runs, and reduces beside backward. What runs beside
a collective is slowed (`RankLinks.both_us`). The first gather and the last reduction have
nothing beside them. Inside of a pipeline all reductions come at its end, in torch's own loops.
"""

from __future__ import annotations

import math

import msgspec

from remat.cluster.mesh import Cluster, Degrees, Job, Mesh
from remat.cluster.parts import Part
from remat.cluster.stages import GRADIENT_BYTES, WEIGHT_BYTES, border_bytes

_UPDATE_BYTES = 28
"""Moved for a parameter's AdamW step: master and moments read and written, its gradient read."""


class _UnitTimes(msgspec.Struct, frozen=True):
    """Collectives of the states of one unit of FSDP2.

    `again_us` : to gather for backward. `scatter_us` : within a shard group. `reduce_us` : that,
    and over the replicas too.
    """

    gather_us: float
    again_us: float
    scatter_us: float
    reduce_us: float


def _unit_times(cluster: Cluster, mesh: Mesh, parameters: int) -> _UnitTimes:
    """Of a unit with so many parameters on a tensor parallel rank."""
    links, tp, shard = cluster.links, mesh.degrees.tp, mesh.shard
    weights, gradients = WEIGHT_BYTES * parameters, GRADIENT_BYTES * parameters
    # hpZ: from forward to backward, shards lie over fewer ranks.
    over = mesh.keep if mesh.keep < shard else shard
    again_us = 0.0 if mesh.keep == 1 else links.us("all_gather", weights, over, tp)
    scatter_us = links.us("reduce_scatter", gradients, shard, tp)
    over_replicas = links.us("all_reduce", gradients / shard, mesh.replicas, tp * shard)
    gather_us = links.us("all_gather", weights, shard, tp)
    return _UnitTimes(gather_us, again_us, scatter_us, scatter_us + over_replicas)


def update_us(cluster: Cluster, mesh: Mesh, parameters: int) -> float:
    return _UPDATE_BYTES * parameters / mesh.shard / cluster.bytes_per_us


def hop_us(job: Job, cluster: Cluster, d: Degrees) -> float:
    # Stages are the outermost dimension of the mesh: a neighbour is as many ranks away.
    far = d.tp * d.cp * d.dp >= cluster.node_size
    return cluster.links.send_us(border_bytes(job, d), far=far)


def data_parallel_us(
    job: Job, cluster: Cluster, mesh: Mesh, block: Part, block_extra_us: float, ends_us: float
) -> float:
    """Of all microbatches without a pipeline; `ends_us` is of one in what is beside the blocks."""
    degrees, links = mesh.degrees, cluster.links
    tp, last = degrees.tp, degrees.microbatches - 1
    unit = _unit_times(cluster, mesh, job.weights["block"].on_rank(tp))
    ends = _unit_times(
        cluster, mesh, job.weights["first"].on_rank(tp) + job.weights["last"].on_rank(tp)
    )

    def one_us(i: int) -> float:
        # Parameters that are kept whole are gathered once.
        is_gathered = mesh.keep > 1 or i == 0

        def back_us(of: _UnitTimes) -> float:
            reduced = of.reduce_us if i == last else of.scatter_us * mesh.reduce_each
            return of.again_us + reduced

        forward = links.both_us(block.forward_us, unit.gather_us * is_gathered)
        backward = links.both_us(block.backward_us + block_extra_us, back_us(unit))
        around = links.both_us(ends_us, ends.gather_us * is_gathered + back_us(ends))
        return job.layers * (forward + backward) + around

    # Microbatches between the first and the last are alike.
    between = max(degrees.microbatches - 2, 0)
    total = sum(map(one_us, {0, last})) + (between * one_us(1) if between else 0.0)
    return unit.gather_us + unit.reduce_us + total


def behind_pipeline_us(
    job: Job, cluster: Cluster, mesh: Mesh, block: Part, blocks: int, parameters: int
) -> float:
    """What a stage's states add to a pipeline: gathers before it, reductions and updates behind."""
    unit = _unit_times(cluster, mesh, job.weights["block"].on_rank(mesh.degrees.tp))
    # The first forward has gathers beside it; FSDP2 then keeps parameters whole to the end.
    waits = max(cluster.links.both_us(block.forward_us, unit.gather_us) - block.forward_us, 0.0)
    share = parameters / max(job.weights["block"].on_rank(mesh.degrees.tp), 1)
    return blocks * waits + share * unit.reduce_us + update_us(cluster, mesh, parameters)


def no_overlap(cluster: Cluster) -> Cluster:
    # As if all that runs beside a collective stood still.
    return msgspec.structs.replace(
        cluster, links=msgspec.structs.replace(cluster.links, beside=math.inf)
    )
