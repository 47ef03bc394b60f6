"""Which meshes there are: degrees of each parallelism, microbatches, and how states are held."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from remat.graph_capture.cluster.chain_shape import shares_heads
from remat.solver.cluster.job import Cluster, Job, divisors

MICROBATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3, 4, 6, 8)
"""Sizes of a microbatch and chunks of a rank that are tried."""
SCHEDULES = "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"
"""Torch's names of those that are planned: one chunk a rank, several, several with W apart."""
LEAST_TOKENS = 4096
"""Fewer tokens of a sequence are given to a rank only where that is asked for."""


class Degrees(msgspec.Struct, frozen=True, order=True):
    """Ranks of each kind, and how a batch goes through them.

    Attributes
    ----------
    tp, cp, pp, dp : tensor, context, pipeline and data parallel; their product is all GPUs.
    microbatch : its sequences. microbatches : of each data parallel rank. chunks : of the model on
        each rank of a pipeline. is_split : whether gradients of weights are made apart, where a
        rank would wait.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    microbatch: int
    microbatches: int
    chunks: int
    is_split: bool = False

    @property
    def schedule(self) -> str:
        """Torch's name of how the pipeline runs; empty without one."""
        if self.pp == 1:
            return ""
        return SCHEDULES[0] if self.chunks == 1 else SCHEDULES[1 + self.is_split]

    def rounds(self, weight_share: float = 0.5) -> float:
        """Microbatches, and the bubble in microbatches of one stage, over all stages.

        Times the work of one microbatch, no step of a pipeline takes less.

        Parameters
        ----------
        weight_share : of a block's time, what gradients of weights take. Where they are made apart
            they fill the bubble twice: a half of the time leaves none of it.
        """
        if self.chunks == 1:
            return (self.microbatches - 1) / self.pp + 1
        left = max(1 - 2 * weight_share, 0.0) if self.is_split else 1.0
        return (self.microbatches + left * (self.pp - 1) / self.chunks) / self.pp


class Mesh(msgspec.Struct, frozen=True):
    """Degrees, and how parameters P, gradients G and optimizer states OS are held.

    Attributes
    ----------
    shard : ranks over which a state is split at rest. keep : between a block's forward and its
        backward, parameters are whole (1), or split over so many. reduce_each : gradients are
        reduced after each microbatch; else they are kept whole until the last.
    """

    degrees: Degrees
    shard: int
    keep: int
    reduce_each: bool

    @property
    def replicas(self) -> int:
        """Groups of ranks that each hold all states."""
        return self.degrees.dp * self.degrees.cp // self.shard


class Asked(msgspec.Struct, frozen=True):
    """What the user fixes; None leaves a choice open."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    microbatch: int | None = None
    chunks: int | None = None
    shard: int | None = None
    schedule: str | None = None

    def allows(self, **chosen: int | str) -> bool:
        """Whether nothing that is fixed is another number."""
        return all(getattr(self, name) in (None, value) for name, value in chosen.items())

    def of(self, name: str, usual: tuple[int, ...]) -> tuple[int, ...]:
        """What is to be tried of a degree."""
        asked: int | None = getattr(self, name)
        return usual if asked is None else (asked,)


def all_degrees(job: Job, cluster: Cluster, asked: Asked) -> Iterator[Degrees]:
    """Every mesh that splits the GPUs without a rest, within the limits above."""
    tensor = tuple(tp for tp in job.tensor_degrees if tp <= cluster.node_size)
    stages = (1,) if job.tied else tuple(d for d in divisors(cluster.gpus) if d <= job.layers)
    for tp, cp, pp in product(
        asked.of("tp", tensor), asked.of("cp", job.context_degrees), asked.of("pp", stages)
    ):
        is_split = cluster.gpus % (tp * cp * pp) == 0 and pp <= job.layers
        if not is_split or not _is_context(job, asked, tp, cp):
            continue
        dp = cluster.gpus // (tp * cp * pp)
        for microbatch in asked.of("microbatch", MICROBATCHES):
            if job.batch % (dp * microbatch) == 0:
                m = job.batch // (dp * microbatch)
                yield from _with_chunks(job, asked, tp, cp, pp, dp, microbatch, m)


def _is_context(job: Job, asked: Asked, tp: int, cp: int) -> bool:
    """Whether a rank has whole tokens of a sequence, and enough of them, and whole heads."""
    if job.seq % (tp * cp) or not all(shares_heads(heads, tp, cp) for heads in job.heads):
        return False
    return cp == 1 or asked.cp is not None or job.seq // cp >= LEAST_TOKENS


def _with_chunks(
    job: Job, asked: Asked, tp: int, cp: int, pp: int, dp: int, microbatch: int, m: int
) -> Iterator[Degrees]:
    if m < pp or (pp == 1 and not asked.allows(chunks=1, schedule="")):
        return
    for chunks in asked.of("chunks", CHUNKS) if pp > 1 else (1,):
        if chunks > 1 and (even_layers(job.layers, pp, chunks) is None or m % pp):
            continue
        # Backward with collectives is not split (`rewriter/split_backward/splitting.py`).
        for is_split in (False, True) if chunks > 1 and tp == cp == 1 else (False,):
            found = Degrees(tp, cp, pp, dp, microbatch, m, chunks, is_split)
            if asked.allows(schedule=found.schedule):
                yield found


def even_layers(layers: int, pp: int, chunks: int) -> tuple[int, ...] | None:
    """Blocks of each rank whose chunks are even; the last, and then the first, may lack one.

    None where they are not even so.
    """
    of_chunk = -(-layers // (pp * chunks))
    lacking = of_chunk * pp * chunks - layers
    if lacking > 2 or (lacking and of_chunk == 1):
        return None
    found = [of_chunk * chunks] * pp
    found[-1] -= lacking > 0
    found[0] -= lacking > 1
    return tuple(found)


def places_of_blocks(layers: tuple[int, ...], chunks: int) -> list[list[range]]:
    """For each rank, and each of its chunks, which blocks of the model it has.

    The chunks of all ranks come one after another: the first of each rank, then the second.
    """
    sizes = [[-(-n // chunks)] * chunks for n in layers]
    # A first rank lacks a block beside the embedding, a last one beside the head.
    sizes[0][0] -= sum(sizes[0]) - layers[0]
    sizes[-1][-1] -= sum(sizes[-1]) - layers[-1]
    places: list[list[range]] = [[] for _ in layers]
    at = 0
    for chunk in range(chunks):
        for rank, of_rank in enumerate(sizes):
            places[rank].append(range(at, at + of_rank[chunk]))
            at += of_rank[chunk]
    return places


def all_states(degrees: Degrees, cluster: Cluster, asked: Asked) -> Iterator[Mesh]:
    """Every way in which torch can hold the states (DDP, ZeRO-1 to 3, hpZ, HSDP).

    Inside of `torch.distributed.pipelining`, FSDP2 keeps parameters and gradients whole through all
    microbatches, whatever it is told.
    """
    ranks = degrees.dp * degrees.cp
    in_node = max(1, min(ranks, cluster.node_size // degrees.tp))
    shards = sorted({1, in_node, ranks} if ranks % in_node == 0 else {1, ranks})
    for shard in shards:
        # Context parallel ranks of a sequence are always in one group of `fully_shard`.
        if shard % degrees.cp or not asked.allows(shard=shard):
            continue
        if degrees.pp > 1 or shard == 1:
            yield Mesh(degrees, shard, 1, reduce_each=False)
            continue
        for keep in sorted({1, shard} | ({in_node} if 1 < in_node < shard else set[int]())):
            for each in (True, False) if degrees.microbatches > 1 else (True,):
                yield Mesh(degrees, shard, keep, each)
