"""What a graph asks of the memory below its device, and which of two such memories a plan gets.

Tensors of a CPU go to files (`file_tier.py`), tensors of a CUDA device to pinned memory of the host
over two streams of their own, and from there to files (`stream_tier.py`).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.errors import TierError
from remat.graph_capture.graph import Links, TrainingGraph
from remat.rewriter.tiers.file_tier import HostPlaces, host_places
from remat.schedules.schedule import Schedule
from remat.schedules.simulation import Simulation


class TierCopies(Protocol):
    """Copies of values below one device. Each function is called by a node of a graph.

    Attributes
    ----------
    places : where each stay of a value on the host lies, if the host is one planned range.
    """

    places: HostPlaces

    def require_room(self) -> None:
        """Raise `TierError` if a step that begins now would not have the room that it needs."""
        ...

    def offload(self, x: Tensor, place_bytes: int) -> Tensor:
        """Begin to copy all of the storage of `x` to the host; its handle."""
        ...

    def leave(self, handle: Tensor, x: Tensor) -> Tensor:
        """Let `x` go only once it is copied; the same handle."""
        ...

    def fetch(self, handle: Tensor) -> Any:
        """Take memory on the device, and begin to copy into it; what `arrive` takes."""
        ...

    def arrive(self, pending: Any) -> Tensor:
        """The tensor that was fetched, as it was."""
        ...

    def write(self, handle: Tensor) -> Tensor:
        """Begin to copy from the host to NVMe; a handle of the copy there."""
        ...

    def read(self, handle: Tensor, place_bytes: int) -> Tensor:
        """Begin to copy from NVMe to the host; a handle of the copy there."""
        ...


def tier_for(
    graph: TrainingGraph, schedule: Schedule, links: Links | None, found: Simulation
) -> TierCopies | None:
    """The memory that a plan copies values to, with room for a step; None if it copies none."""
    if not schedule.moves:
        return None
    if links is None:  # the simulator has refused it already
        raise TierError("this plan copies values to the host, and nothing is known of a host")
    tier: TierCopies
    if is_cuda(graph.device):
        from remat.rewriter.tiers.stream_tier import StreamTier

        places = host_places(graph, schedule)
        tier = StreamTier(graph.device, places, links, found.nvme_peak_bytes)
    else:
        from remat.rewriter.tiers.file_tier import FileTier

        tier = FileTier(found.host_peak_bytes, found.nvme_peak_bytes, links.nvme_path)
    # A lack of room shows when the module is made, not only in a step.
    tier.require_room()
    return tier
