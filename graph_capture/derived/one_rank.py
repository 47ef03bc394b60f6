"""The step of one rank: with what DDP or FSDP2 adds to it, buckets, gathered buffers and shards.

The time of communication is not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remat.graph_capture.derived.block_units import Unit, ops_by_block, with_units
from remat.graph_capture.derived.bucket_step import into_buckets
from remat.graph_capture.derived.fsdp_step import FsdpStep
from remat.graph_capture.derived.sharding import UNTIMED, Sharding
from remat.graph_capture.graph import TrainingGraph


def sharded(
    graph: TrainingGraph, units: Sequence[Unit], sharding: Sharding, *, is_eager: bool = False
) -> TrainingGraph:
    """`graph` as it runs on one rank, where each unit is wrapped by itself, then the model.

    Parameters
    ----------
    graph : with `resident` counted for the sharding already, see `resident_bytes`.
    units : as of `with_units`, in the order of forward.
    is_eager : whether units run op by op, so that each gradient leaves backward by itself.
    """
    if sharding.kind in ("fsdp2", "replicate"):
        return FsdpStep(graph, units, sharding).graph()
    if sharding.bucket_views:
        return into_buckets(graph, () if is_eager else units)
    return graph


def on_one_rank(
    graph: TrainingGraph, sharding: Sharding, *, is_rewritten: bool = False
) -> TrainingGraph:
    """The step of one rank, with blocks found by the module paths of ops.

    Parameters
    ----------
    is_rewritten : whether the whole step is to be one autograd node, which hands all its gradients
        over at its end. DDP's buckets then stand beside all of them, views or not.

    Raises
    ------
    CaptureError : the glob of blocks matches no module, or they cannot run as units.
    """
    if sharding.kind == "none":
        return graph
    if sharding.has_buckets and (is_rewritten or not sharding.bucket_views):
        return msgspec.structs.replace(graph, notes=(*graph.notes, UNTIMED))
    if not sharding.blocks:
        return sharded(graph, (), sharding)
    found = with_units(graph, ops_by_block(graph, sharding.blocks))
    return sharded(*found, sharding, is_eager=True)
