"""What a stage holds beside activations, by holder: states and buffers of its border.

Of mixed precision as torchtitan trains: parameters P and activations in bfloat16, gradients G,
masters and two moments (OS) in float32. With FSDP2, P at rest are the masters. ψ are a rank's
parameters, S the ranks of a shard group:

    OS and masters  12 ψ / S        P  2 ψ / keep, and what is gathered and copied for one block
    G  4 ψ, or 4 ψ / S if reduced for each microbatch, and what one block's reduction copies
    borders  a receive buffer each way for each microbatch, one gradient on its way, one output

Sources: ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); FSDP2's buffers as
measured on CPU ranks. Not counted: temporaries of the optimizer's step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from remat.schedules.pipeline.holders import BORDERS, GRADIENTS, PARAMETERS, STATES
from remat.solver.cluster.job import Cluster, Job
from remat.solver.cluster.mesh import Degrees, Mesh

Counts = npt.NDArray[np.int64]

STATE_BYTES, WEIGHT_BYTES, GRADIENT_BYTES = 12, 2, 4
"""Of one parameter: master and two moments in float32; in bfloat16; its float32 gradient."""


def stage_parameters(job: Job, tp: int, blocks: Counts, *, first: bool, last: bool) -> Counts:
    """Elements that one rank has of a stage with so many blocks."""
    ends = first * job.weights["first"].on_rank(tp) + last * job.weights["last"].on_rank(tp)
    return blocks * job.weights["block"].on_rank(tp) + ends


def least_states_bytes(job: Job, mesh: Mesh) -> float:
    """Of the stage that holds most of P, G and OS, at least: no cut gives each less than the mean.

    Buffers, borders and activations come on top.
    """
    all_blocks = np.array(job.layers)
    whole = stage_parameters(job, mesh.degrees.tp, all_blocks, first=True, last=True)
    split = mesh.shard if mesh.reduce_each else 1
    of_one = STATE_BYTES / mesh.shard + WEIGHT_BYTES / mesh.keep + GRADIENT_BYTES / split
    return of_one * float(whole) / mesh.degrees.pp


def border_bytes(job: Job, degrees: Degrees) -> int:
    """Of what one rank sends for a microbatch: tensor parallel ranks split the sequence too."""
    return degrees.microbatch * job.border_bytes // (degrees.tp * degrees.cp)


def held_bytes(
    job: Job, cluster: Cluster, mesh: Mesh, blocks: Counts, open_forwards: int,
    *, first: bool, last: bool,
) -> dict[str, Counts]:  # fmt: skip
    """By holder, for each number of blocks.

    Parameters
    ----------
    open_forwards : chunks of the stage in flight.
    """
    tp, shard = mesh.degrees.tp, mesh.shard
    parameters = stage_parameters(job, tp, blocks, first=first, last=last)
    one_block = job.weights["block"].on_rank(tp)
    is_whole = mesh.keep == 1 and shard == 1
    buffers = 0 if is_whole else 2 * WEIGHT_BYTES * one_block
    reduced = GRADIENT_BYTES * one_block if shard > 1 else 0
    split = shard if mesh.reduce_each else 1
    return {
        STATES: STATE_BYTES * parameters // shard,
        PARAMETERS: WEIGHT_BYTES * parameters // mesh.keep + buffers,
        GRADIENTS: GRADIENT_BYTES * parameters // split + reduced,
        BORDERS: np.zeros_like(blocks)
        + _border_buffers(job, cluster, mesh, open_forwards, first=first, last=last),
    }


def _border_buffers(
    job: Job, cluster: Cluster, mesh: Mesh, open_forwards: int, *, first: bool, last: bool
) -> int:
    """Receive buffers. A received input in flight is what the stage's first block saves."""
    degrees = mesh.degrees
    if degrees.pp == 1:
        return 0
    all_of = degrees.microbatches * degrees.chunks
    of_gradients = open_forwards if cluster.receive_ring else all_of
    of_inputs = 0 if cluster.receive_ring else all_of - open_forwards
    ends = degrees.chunks > 1  # each rank then receives on both sides, but for one chunk of an end
    takes_inputs, takes_gradients = not first or ends, not last or ends
    slots = of_inputs * takes_inputs + of_gradients * takes_gradients
    return border_bytes(job, degrees) * (slots + 2)
