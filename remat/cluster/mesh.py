"""Which meshes there are: degrees of each parallelism, microbatches, and how states are held.

And what is asked of them: a cluster, a step, and what is fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from remat.budgets import RESERVE, parse_budget
from remat.cluster.parts import ChainPosition, Part, PartWork, block_position
from remat.graph_capture.devices.known_devices import (
    datasheet_links,
    device_table,
    is_in_table,
    modelled_device,
    read_rank_links,
    shares_of,
)
from remat.graph_capture.devices.links import RankLinks
from remat.graph_capture.errors import BudgetError, DeviceError


class Weights(msgspec.Struct, frozen=True):
    """Parameters of a part, in elements: those that tensor parallel ranks share, and others.

    `frozen_split`, `frozen_whole` : of these, those that do not train.
    """

    split: int = 0
    whole: int = 0
    frozen_split: int = 0
    frozen_whole: int = 0

    def on_rank(self, tp: int) -> int:
        """Elements that one of `tp` ranks has."""
        return -(-self.split // tp) + self.whole

    def trained_on_rank(self, tp: int) -> int:
        """Those that have gradients and optimizer states."""
        return self.on_rank(tp) - -(-self.frozen_split // tp) - self.frozen_whole


class Job(msgspec.Struct, frozen=True):
    """One step of a chain of blocks.

    `batch` : sequences of a step, over all ranks. `seq` : tokens of each. `border_bytes` : of one
    sequence between two blocks. `products_flops` : of forward and backward of one sequence, in
    matrix products with weights, of a block and of what comes behind all. `model_flops` : of a
    step's forward and backward of one sequence, attention included, causal attention by half.
    `unstaged` : why the chain cannot be cut into stages, beginning with a way out; empty if it can.
    `heads` : of queries and of keys, of each attention whose heads context parallel ranks share.
    `kinds` : of each block in turn; empty where all are equal. `unrun` : why
    `remat.cluster.parallelize` does not run the chain, likewise. `unsent` : why it does not with
    stages or context parallel ranks.
    """

    name: str
    layers: int
    batch: int
    seq: int
    weights: dict[ChainPosition, Weights]
    border_bytes: int
    products_flops: dict[ChainPosition, int]
    model_flops: int
    tensor_degrees: tuple[int, ...] = (1,)
    context_degrees: tuple[int, ...] = (1,)
    unstaged: str = ""
    heads: tuple[tuple[int, int], ...] = ()
    kinds: tuple[int, ...] = ()
    unrun: str = ""
    unsent: str = ""

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        return self.kinds or (0,) * self.layers

    @property
    def block_positions(self) -> tuple[ChainPosition, ...]:
        """Of each kind."""
        return tuple(block_position(kind) for kind in range(max(self.kind_of_layer) + 1))

    @property
    def all_positions(self) -> list[ChainPosition]:
        """The part of each block in turn, and of both ends."""
        return ["first", *map(block_position, self.kind_of_layer), "last"]

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return sum(self.weights[place].on_rank(1) for place in self.all_positions)


class Cluster(msgspec.Struct, frozen=True):
    """GPUs and their links.

    `budget_bytes` : of one GPU. `flops_per_us` : the peak, for products. `reached_flops_per_us` :
    the most that a product is taken to reach. `bytes_per_us` : of the GPU's memory, as ops reach
    it. `receive_ring` : count receive buffers for the microbatches in flight alone. Torch allocates
    one for each microbatch, and each direction.
    """

    gpus: int
    device: str
    budget_bytes: int
    flops_per_us: float
    reached_flops_per_us: float
    bytes_per_us: float
    links: RankLinks
    receive_ring: bool = False

    @property
    def node_size(self) -> int:
        return self.links.node_size


class Parts(Protocol):
    """Gives the parts of a job: captured when first asked for, or kept from before."""

    def work(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> PartWork:
        """Of one part; its options need not be known."""
        ...

    def part(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> Part:
        """The part of one rank, for one microbatch."""
        ...


_MICROBATCHES, _WHOLE_BATCH = range(1, 9), 16
"""Sizes of a microbatch that are tried; and below which a rank's whole batch is, too."""
_VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
SCHEDULES = "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"
"""Torch's names of those that are planned: one stage a rank, several, several with W apart."""
_LEAST_TOKENS = 4096  # fewer tokens of a sequence are given to a rank only where that is asked for


class Degrees(msgspec.Struct, frozen=True, order=True):
    """Ranks of each kind, whose product is all GPUs, and how a batch goes through them.

    `microbatch` : its sequences. `microbatches` : of each data parallel rank. `virtual_stages` : of
    each rank. `is_split` : whether gradients of weights are made apart, where a rank would wait.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    microbatch: int
    microbatches: int
    virtual_stages: int = msgspec.field(name="chunks")
    is_split: bool = False

    @property
    def schedule(self) -> str:
        """Torch's name of how the pipeline runs; empty without one."""
        if self.pp == 1:
            return ""
        return SCHEDULES[0] if self.virtual_stages == 1 else SCHEDULES[1 + self.is_split]

    def rounds(self, weight_share: float = 0.5) -> float:
        """Microbatches, and the bubble in microbatches of one stage, over all stages.

        Times the work of one microbatch, no step of a pipeline takes less. `weight_share` is what
        gradients of weights take of a block's time.
        """
        if self.virtual_stages == 1:
            return (self.microbatches - 1) / self.pp + 1
        # Made apart, they fill the bubble twice: a half of the time leaves none of it.
        left = max(1 - 2 * weight_share, 0.0) if self.is_split else 1.0
        return (self.microbatches + left * (self.pp - 1) / self.virtual_stages) / self.pp


class Mesh(msgspec.Struct, frozen=True):
    """Degrees, and how parameters P, gradients G and optimizer states OS are held.

    `shard` : ranks over which a state is split at rest. `keep` : between a block's forward and its
    backward, parameters are whole (1), or split over so many. `reduce_each` : gradients are
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


class MeshSpec(msgspec.Struct, frozen=True):
    """What the user fixes; None leaves a choice open."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    microbatch: int | None = None
    virtual_stages: int | None = msgspec.field(default=None, name="chunks")
    shard: int | None = None
    schedule: str | None = None

    def allows(self, **chosen: int | str) -> bool:
        return all(getattr(self, name) in (None, value) for name, value in chosen.items())

    def of(self, name: str, usual: tuple[int, ...]) -> tuple[int, ...]:
        asked: int | None = getattr(self, name)
        return usual if asked is None else (asked,)


def all_degrees(job: Job, cluster: Cluster, asked: MeshSpec) -> Iterator[Degrees]:
    """Every mesh that splits the GPUs without a rest, within the limits above."""
    # Tensor parallel ranks over several nodes are not planned for.
    tensor = tuple(tp for tp in job.tensor_degrees if tp <= cluster.node_size)
    most = 1 if job.unstaged else min(cluster.gpus, job.layers)
    stages = tuple(n for n in range(1, most + 1) if cluster.gpus % n == 0)
    for tp, cp, pp in product(
        asked.of("tp", tensor), asked.of("cp", job.context_degrees), asked.of("pp", stages)
    ):
        is_split = cluster.gpus % (tp * cp * pp) == 0 and pp <= job.layers
        # A rank has whole tokens of a sequence, and enough of them.
        ring = ring_ranks(job.heads, tp, cp)
        # In a ring each rank has two parts of a sequence.
        is_split &= job.seq % (tp * cp * (2 if ring > 1 else 1)) == 0
        # A ring's sums are rounded otherwise than on one rank, so only who asks for it gets one.
        is_split &= ring == 1 or asked.cp is not None
        is_split &= cp == 1 or asked.cp is not None or job.seq // cp >= _LEAST_TOKENS
        if not is_split:
            continue
        dp = cluster.gpus // (tp * cp * pp)
        of_rank, rest = divmod(job.batch, dp)
        sizes = (*_MICROBATCHES, of_rank) if of_rank < _WHOLE_BATCH else tuple(_MICROBATCHES)
        for microbatch in asked.of("microbatch", tuple(dict.fromkeys(sizes))):
            if microbatch and not (rest or of_rank % microbatch):
                d = Degrees(tp, cp, pp, dp, microbatch, of_rank // microbatch, 1)
                yield from _with_virtual_stages(job, asked, d)


def ring_ranks(heads: Iterable[tuple[int, int]], tp: int, cp: int) -> int:
    """Of `cp` context parallel ranks, how many have attention go round: 1 where all share heads.

    Both at once are LoongTrain's (Gu et al. 2024, https://arxiv.org/abs/2406.18485): neighbours
    share heads, and the tokens of these go round.
    """
    shared = (n for n in range(cp, 0, -1) if cp % n == 0)
    return cp // next(n for n in shared if all(shares_heads(one, tp, n) for one in heads))


def shares_heads(heads: tuple[int, int], tp: int, cp: int) -> bool:
    queries, keys = (n // tp for n in heads)
    if cp == 1:
        return True
    # Where there are more ranks than heads of keys, each such head goes to several ranks.
    return queries % cp == 0 and keys > 0 and (keys % cp == 0 or cp % keys == 0)


def _with_virtual_stages(job: Job, asked: MeshSpec, d: Degrees) -> Iterator[Degrees]:
    m, pp = d.microbatches, d.pp
    # Fewer microbatches than stages would wait for each other.
    if m < pp or (pp == 1 and not asked.allows(virtual_stages=1, schedule="")):
        return
    for virtual_stages in asked.of("virtual_stages", _VIRTUAL_STAGES) if pp > 1 else (1,):
        if virtual_stages > 1 and (even_layers(job.layers, pp, virtual_stages) is None or m % pp):
            continue
        # Backward with collectives is not split (`remat/cluster/apply/split_backward.py`).
        for is_split in (False, True) if virtual_stages > 1 and d.tp == d.cp == 1 else (False,):
            found = replace(d, virtual_stages=virtual_stages, is_split=is_split)
            if asked.allows(schedule=found.schedule):
                yield found


def even_layers(layers: int, pp: int, virtual_stages: int) -> tuple[int, ...] | None:
    """Blocks of each rank in even virtual stages; None where they are not even."""
    of_each = -(-layers // (pp * virtual_stages))
    lacking = of_each * pp * virtual_stages - layers
    if lacking > 2 or (lacking and of_each == 1):
        return None
    found = [of_each * virtual_stages] * pp
    # The head takes the place of one block, and then the embedding.
    found[-1] -= lacking > 0
    found[0] -= lacking > 1
    return tuple(found)


def places_of_blocks(layers: tuple[int, ...], virtual_stages: int) -> list[list[range]]:
    """For each rank, and each of its virtual stages, which blocks it has."""
    sizes = [[-(-n // virtual_stages)] * virtual_stages for n in layers]
    # A first rank lacks a block beside the embedding, a last one beside the head.
    sizes[0][0] -= sum(sizes[0]) - layers[0]
    sizes[-1][-1] -= sum(sizes[-1]) - layers[-1]
    places: list[list[range]] = [[] for _ in layers]
    at = 0
    # Virtual stages come in turn: the first of each rank, then the second.
    for virtual_stage in range(virtual_stages):
        for rank, of_rank in enumerate(sizes):
            places[rank].append(range(at, at + of_rank[virtual_stage]))
            at += of_rank[virtual_stage]
    return places


def virtual_layouts(job: Job, gpus: int, asked: MeshSpec) -> Iterator[list[range]]:
    """Ranges of blocks that a rank has as virtual stages, of all ranks and layouts."""
    # Of equal blocks any number is a run.
    for pp in range(2, min(gpus, job.layers) + 1 if job.kinds and not job.unstaged else 0):
        for virtual_stages in asked.of("virtual_stages", _VIRTUAL_STAGES):
            layers = even_layers(job.layers, pp, virtual_stages)
            if gpus % pp == 0 and virtual_stages > 1 and layers is not None:
                yield from places_of_blocks(layers, virtual_stages)


def all_states(degrees: Degrees, cluster: Cluster, asked: MeshSpec) -> Iterator[Mesh]:
    """Every way in which torch can hold the states (DDP, ZeRO-1 to 3, hpZ, HSDP)."""
    ranks = degrees.dp * degrees.cp
    # Tensor parallel ranks lie side by side, so a node has this many data parallel ones.
    in_node = max(1, min(ranks, cluster.node_size // degrees.tp))
    shards = sorted({1, in_node, ranks} if ranks % in_node == 0 else {1, ranks})
    for shard in shards:
        # Context parallel ranks of a sequence are always in one group of `fully_shard`.
        if shard % degrees.cp or not asked.allows(shard=shard):
            continue
        # Inside of torch's pipelining, FSDP2 keeps parameters and gradients whole through all
        # microbatches, whatever it is told.
        if degrees.pp > 1 or shard == 1:
            yield Mesh(degrees, shard, 1, reduce_each=False)
            continue
        for keep in sorted({1, shard} | ({in_node} if 1 < in_node < shard else set[int]())):
            for each in (True, False) if degrees.microbatches > 1 else (True,):
                yield Mesh(degrees, shard, keep, each)


# What a person asks of the verb `cluster` is checked before anything runs.


@dataclass(frozen=True)
class ClusterRequest:
    """A cluster and a step, as a person asks for them.

    `seq` : tokens of each sequence of the `batch`. `budget` : of one GPU, in bytes or ``auto``.
    `links` : a file of measured links, or a profile that has them. `asked` : what is fixed.
    `blocks` : a glob over the paths of blocks. `receive_ring` : as of `Cluster`.
    """

    gpus: int
    batch: int
    seq: int
    device: str = "h100"
    node_size: int = 8
    budget: str = "auto"
    links: Path | None = None
    asked: MeshSpec = field(default_factory=MeshSpec)
    blocks: str = ""
    receive_ring: bool = False

    def cluster(self) -> Cluster:
        """`DeviceError` for a device or links that are not known, `BudgetError` for a share."""
        if not is_in_table(self.device):
            raise DeviceError(
                f"choose {', '.join(device_table().devices)}: a cluster is only modelled, and "
                f"{self.device!r} is not in the table of devices"
            )
        device = modelled_device(self.device)
        shares = shares_of(device)
        path, size = self.links, self.node_size
        links = read_rank_links(path, size) if path else datasheet_links(self.device, size)
        budget, peak = parse_budget(self.budget), device.flops_per_us("bfloat16")
        if budget.kind not in ("auto", "bytes"):
            raise BudgetError(
                f"give a budget for each GPU, such as 72GiB, or auto: {self.budget!r} only makes "
                "sense for one step on one device"
            )
        left_bytes = int(device.memory_bytes * (1 - RESERVE))
        budget_bytes = left_bytes if budget.kind == "auto" else budget.size_bytes
        return Cluster(
            self.gpus, self.device, budget_bytes, peak, peak * shares["matmul"].rate,
            device.bytes_per_us * shares["other"].bandwidth, links, self.receive_ring,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `DeviceError` for numbers that no mesh has."""
        for name in ("gpus", "node_size", "batch", "seq"):
            if (number := getattr(self, name)) < 1:
                raise DeviceError(f"--{name.replace('_', '-')} must be 1 or more, not {number}")
        if self.gpus > self.node_size and self.gpus % self.node_size:
            raise DeviceError(
                f"give --node-size, or another --gpus: {self.gpus} GPUs are not whole nodes of "
                f"{self.node_size}"
            )
        tp, cp, pp = (getattr(self.asked, name) or 1 for name in ("tp", "cp", "pp"))
        if self.gpus % (tp * cp * pp):
            raise DeviceError(
                f"choose degrees whose product divides {self.gpus} GPUs: tp {tp} x cp {cp} x pp "
                f"{pp} does not"
            )
        if tp > self.node_size:
            raise DeviceError(
                f"choose --tp {self.node_size} or less: --tp {tp} spans nodes of {self.node_size} "
                "GPUs, which is not planned"
            )
        self._check_schedule()
        self._check_batch(tp * cp * pp, pp)

    def _check_schedule(self) -> None:
        name, virtual_stages = self.asked.schedule, self.asked.virtual_stages
        if name is None:
            return
        if name not in SCHEDULES:
            raise DeviceError(
                f"choose --schedule from {', '.join(SCHEDULES)}, not {name!r}; "
                "remat.cluster.parallelize(..., schedule=) runs torch's others with such a plan"
            )
        if name == SCHEDULES[2] and (self.asked.tp != 1 or self.asked.cp not in (None, 1)):
            raise DeviceError(
                f"give --tp 1 --cp 1: --schedule {name} is for blocks without collectives"
            )
        if virtual_stages is not None and (virtual_stages == 1) != (name == SCHEDULES[0]):
            raise DeviceError(
                f"leave out --virtual-stages: --schedule {name} is not for {virtual_stages} on "
                f"each rank; {SCHEDULES[0]} is for one, the others for more"
            )

    def _check_batch(self, ranks: int, pp: int) -> None:
        dp = self.gpus // ranks
        microbatch = self.asked.microbatch or 1
        if self.asked.pp is not None and self.batch % (dp * microbatch):
            raise DeviceError(
                f"choose a --batch that is a multiple of {dp * microbatch}: {self.batch} "
                f"sequences do not divide into microbatches of {microbatch} for {dp} data "
                "parallel ranks"
            )
        m = self.batch // (dp * microbatch)
        # More tensor or context parallel ranks leave fewer replicas, so more microbatches.
        is_fixed = self.asked.tp is not None and self.asked.cp is not None
        if pp > 1 and m < pp and is_fixed:
            raise DeviceError(
                f"choose --batch {pp * dp * microbatch} or more, or --pp {max(m, 1)}: {m} "
                f"microbatches of {microbatch} are fewer than {pp} stages, which then wait for "
                "each other"
            )
