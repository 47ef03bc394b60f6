"""What is to be trained, and on what: the facts that the planner of a cluster begins with."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from remat.graph_capture.cluster.chain_shape import PLACES, Place
from remat.graph_capture.devices.rank_links import RankLinks
from remat.solver.cluster.parts import Part, PartWork


class Weights(msgspec.Struct, frozen=True):
    """Parameters of a part, in elements: those that tensor parallel ranks share, and others."""

    split: int = 0
    whole: int = 0

    def on_rank(self, tp: int) -> int:
        """Elements that one of `tp` ranks has."""
        return -(-self.split // tp) + self.whole


class Job(msgspec.Struct, frozen=True):
    """One step of a chain of equal blocks.

    Attributes
    ----------
    layers : blocks. batch : sequences of a step, over all ranks. seq : tokens of each.
    weights : of each place. border_bytes : of one sequence between two blocks.
    products_flops : of forward and backward of one sequence, in matrix products with weights, of a
        block and of what comes behind all. model_flops : of a step's forward and backward of one
        sequence, attention included, causal attention by half.
    tensor_degrees, context_degrees : at which a block runs.
    tied : weights that are at both ends of the chain, by name.
    heads : of queries and of keys, of each attention whose heads context parallel ranks share.
    """

    name: str
    layers: int
    batch: int
    seq: int
    weights: dict[Place, Weights]
    border_bytes: int
    products_flops: dict[Place, int]
    model_flops: int
    tensor_degrees: tuple[int, ...] = (1,)
    context_degrees: tuple[int, ...] = (1,)
    tied: tuple[str, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()

    @property
    def parameters(self) -> int:
        """Elements of all."""
        ends = (self.weights["first"], self.weights["last"])
        block = self.weights["block"]
        return sum(w.split + w.whole for w in ends) + self.layers * (block.split + block.whole)


class Cluster(msgspec.Struct, frozen=True):
    """GPUs and their links.

    Attributes
    ----------
    budget_bytes : of one GPU. flops_per_us : the peak, for products. reached_flops_per_us : the
        most that a product is priced at. bytes_per_us : of the GPU's memory, as ops reach it.
    receive_ring : count receive buffers for the microbatches in flight alone. Torch allocates one
        for each microbatch, and each direction.
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
        """GPUs of a node."""
        return self.links.node_size


class Parts(Protocol):
    """Gives the parts of a job: captured when first asked for, or kept from before."""

    def work(self, place: Place, tp: int, cp: int, microbatch: int) -> PartWork:
        """Of one part; its options need not be known."""
        ...

    def part(self, place: Place, tp: int, cp: int, microbatch: int) -> Part:
        """The part of one rank, for one microbatch."""
        ...


def products_us(job: Job, cluster: Cluster, tokens_of: float) -> float:
    """Time of all matrix products with weights at the rate that no product is priced above.

    Parameters
    ----------
    tokens_of : sequences that one rank's share of the work comes to.
    """
    flops = sum(job.products_flops[p] * (job.layers if p == "block" else 1) for p in PLACES)
    return flops * tokens_of / cluster.reached_flops_per_us


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
