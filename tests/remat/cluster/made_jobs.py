"""Jobs and parts made by formulas, so that no model is captured."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.cluster.mesh import Cluster, Job, Weights
from remat.cluster.parts import ChainPosition, Part, PartOption, PartWork, WeightsLater
from remat.graph_capture.devices.known_devices import datasheet_links

RATE = 989.4e6 * 0.7


def made_job(layers: int, batch: int, seq: int = 8192, width: int = 4096) -> Job:
    """A decoder with 12 width² parameters a block."""
    block, ends = 12 * width**2, 64_000 * width
    flops: dict[ChainPosition, int] = {"first": 0, "block": 6 * block * seq, "last": 6 * ends * seq}
    return Job(
        "made", layers, batch, seq,
        {"first": Weights(ends), "block": Weights(block, 2 * width), "last": Weights(ends)},
        2 * seq * width, flops, layers * flops["block"] + flops["last"], (1, 2, 4, 8), (1, 2),
    )  # fmt: skip


def made_cluster(gpus: int, budget_gib: float = 72, node_size: int = 8) -> Cluster:
    """Of H100."""
    links = datasheet_links("h100", node_size)
    return Cluster(gpus, "h100", int(budget_gib * 2**30), 989.4e6, RATE, 2.7e6, links)


@dataclass
class MadeParts:
    """Parts whose times are those of their products and a tensor parallel collective."""

    job: Job
    cluster: Cluster
    asked: set[tuple[ChainPosition, int, int, int]] = field(
        default_factory=set[tuple[ChainPosition, int, int, int]]
    )

    def work(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> PartWork:
        """As of `Parts`."""
        return self.part(place, tp, cp, microbatch).work

    def part(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> Part:
        """As of `Parts`."""
        self.asked.add((place, tp, cp, microbatch))
        share = microbatch / (tp * cp)
        products = self.job.products_flops[place] * share / RATE
        border = int(self.job.border_bytes * share)
        moved = self.cluster.links.us("all_gather", border * tp, tp) if place == "block" else 0.0
        if place == "first":
            return Part(10.0, 10.0, (PartOption(0, border, 0.0),))
        again = products / 3
        options = (
            PartOption(18 * border, 6 * border, 0.0),
            PartOption(9 * border, 9 * border, 0.2 * again),
            PartOption(border, 14 * border, again),
        )
        later = WeightsLater(products / 3, 10 * border) if place == "block" else WeightsLater()
        return Part(products / 3 + 2 * moved, 2 * products / 3 + 2 * moved, options, "", later)
