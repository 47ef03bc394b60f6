"""What is asked of the verb `cluster`, read and checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from remat.budgets import RESERVE, parse_budget
from remat.cluster.mesh import SCHEDULES, Cluster, MeshSpec
from remat.graph_capture.devices.known_devices import (
    datasheet_links,
    device_table,
    is_in_table,
    modelled_device,
    read_rank_links,
)
from remat.graph_capture.errors import BudgetError, DeviceError

_BFLOAT16 = "bfloat16"


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
                f"a cluster is planned by model, and {self.device!r} is no device of the table: "
                f"choose {', '.join(device_table().devices)}"
            )
        device, table = modelled_device(self.device), device_table()
        links = (
            datasheet_links(self.device, self.node_size)
            if self.links is None
            else read_rank_links(self.links, self.node_size)
        )
        peak = device.flops_per_us(_BFLOAT16)
        return Cluster(
            self.gpus, self.device, self._budget_bytes(device.memory_bytes), peak,
            peak * table.classes["matmul"].rate,
            device.bytes_per_us * table.classes["other"].bandwidth, links, self.receive_ring,
        )  # fmt: skip

    def _budget_bytes(self, memory_bytes: int) -> int:
        budget = parse_budget(self.budget)
        if budget.kind == "auto":
            return int(memory_bytes * (1 - RESERVE))
        if budget.kind != "bytes":
            raise BudgetError(
                f"budget {self.budget!r} is of one step on one device: a cluster's is of each GPU, "
                "such as 72GiB, or auto"
            )
        return budget.size_bytes

    def check(self) -> None:
        """Raise `DeviceError` for numbers that no mesh has."""
        sizes = {
            "--gpus": self.gpus, "--node-size": self.node_size, "--batch": self.batch,
            "--seq": self.seq,
        }  # fmt: skip
        for flag, number in sizes.items():
            if number < 1:
                raise DeviceError(f"{flag} {number}: it is 1 or more")
        if self.gpus > self.node_size and self.gpus % self.node_size:
            raise DeviceError(
                f"{self.gpus} GPUs are not whole nodes of {self.node_size}: give --node-size, or "
                "another --gpus"
            )
        tp, cp, pp = (getattr(self.asked, name) or 1 for name in ("tp", "cp", "pp"))
        if self.gpus % (tp * cp * pp):
            raise DeviceError(
                f"tp {tp} x cp {cp} x pp {pp} do not divide {self.gpus} GPUs: choose degrees whose "
                "product does"
            )
        if tp > self.node_size:
            raise DeviceError(
                f"--tp {tp} reaches over nodes of {self.node_size} GPUs, which is not planned for: "
                f"choose --tp {self.node_size} or less"
            )
        self._check_schedule()
        self._check_batch(tp * cp * pp, pp)

    def _check_schedule(self) -> None:
        name, virtual_stages = self.asked.schedule, self.asked.virtual_stages
        if name is None:
            return
        if name not in SCHEDULES:
            raise DeviceError(
                f"--schedule {name!r} is none that is planned: choose {', '.join(SCHEDULES)}; "
                "remat.cluster.parallelize(..., schedule=) runs torch's others by such a plan"
            )
        if name == SCHEDULES[2] and (self.asked.tp != 1 or self.asked.cp not in (None, 1)):
            raise DeviceError(
                f"--schedule {name} is for blocks without collectives: give --tp 1 --cp 1"
            )
        if virtual_stages is not None and (virtual_stages == 1) != (name == SCHEDULES[0]):
            raise DeviceError(
                f"--schedule {name} is not for {virtual_stages} virtual stages on each rank: "
                f"{SCHEDULES[0]} is for one, the others for more; leave out --virtual-stages"
            )

    def _check_batch(self, ranks: int, pp: int) -> None:
        dp = self.gpus // ranks
        microbatch = self.asked.microbatch or 1
        if self.asked.pp is not None and self.batch % (dp * microbatch):
            raise DeviceError(
                f"a batch of {self.batch} is not microbatches of {microbatch} for {dp} data "
                f"parallel ranks: choose a --batch that {dp * microbatch} divides"
            )
        m = self.batch // (dp * microbatch)
        # More tensor or context parallel ranks leave fewer replicas, so more microbatches.
        is_fixed = self.asked.tp is not None and self.asked.cp is not None
        if pp > 1 and m < pp and is_fixed:
            raise DeviceError(
                f"{m} microbatches of {microbatch} are fewer than {pp} stages, which then wait for "
                f"each other: choose --batch {pp * dp * microbatch} or more, or --pp {max(m, 1)}"
            )
