"""What a plan moves below the device: bytes, copies, waits, and what slower links would cost."""

from __future__ import annotations

import msgspec

from remat.formats import bytes_text, fine_time_text, percent_text
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import LINK_NAMES
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation

SLOWER = 0.8
"""Share of the rates at which a plan is judged once more: what links may fall to beside other
traffic."""
BYTES_PER_US_IN_GB_S = 1e3
WAYS = {
    "d2h": "to the host", "h2d": "back", "write": "to NVMe", "read": "back from NVMe",
}  # fmt: skip


class LinkUse(msgspec.Struct, frozen=True):
    """Copies over one link: how many, of how many bytes, at which rate, and how long in all."""

    link: str
    copies: int
    moved_bytes: int
    gb_s: float
    busy_us: float


class Offloaded(msgspec.Struct, frozen=True):
    """What a schedule moves between tiers.

    Attributes
    ----------
    source : of the rates, in words. links : those that are used.
    host_bytes, nvme_bytes : most bytes that lie there at once. host_room_bytes, nvme_room_bytes :
        of how many. nvme_path : the folder.
    stalls, stall_us, longest_us : how often and how long the device waits for copies.
    slower_us, slower_overhead : what the step takes more if links have `SLOWER` of their rates, and
        its overhead then.
    """

    source: str
    links: tuple[LinkUse, ...]
    host_bytes: int
    host_room_bytes: int
    nvme_bytes: int
    nvme_room_bytes: int
    nvme_path: str
    stalls: int
    stall_us: float
    longest_us: float
    slower_us: float
    slower_overhead: float

    def rows(self) -> list[tuple[str, str]]:
        """A name and a line for each."""
        said = [("host", self._room_text()), ("copies", self._copies_text())]
        said += [("waits", self._waits_text()), ("slower links", self._slower_text())]
        rates = ", ".join(f"{one.link} {one.gb_s:.3g} GB/s" for one in self.links)
        return [*said, ("links", f"{rates}: {self.source}")]

    def _room_text(self) -> str:
        text = f"{bytes_text(self.host_bytes)} of {bytes_text(self.host_room_bytes)}"
        if not self.nvme_bytes:
            return text
        drive = f"{bytes_text(self.nvme_bytes)} of {bytes_text(self.nvme_room_bytes)}"
        return f"{text}; NVMe {drive} in {self.nvme_path}"

    def _copies_text(self) -> str:
        said = (
            f"{one.copies} {WAYS[one.link]}, {bytes_text(one.moved_bytes)} in "
            f"{fine_time_text(one.busy_us)}"
            for one in self.links
        )
        return "; ".join(said)

    def _waits_text(self) -> str:
        if not self.stalls:
            return "none: the device never waits for a copy"
        all_us, longest_us = fine_time_text(self.stall_us), fine_time_text(self.longest_us)
        return f"the device waits {all_us} for copies, {longest_us} at most at once"

    def _slower_text(self) -> str:
        return (
            f"at {SLOWER} of these rates a step takes {fine_time_text(self.slower_us)} more, "
            f"{percent_text(self.slower_overhead)} overhead; its peaks stay"
        )


def offloaded(
    graph: TrainingGraph, schedule: Schedule | None, found: Simulation | None = None
) -> Offloaded | None:
    """What `schedule` moves; None where it moves nothing. `found` is its simulation, if at hand."""
    if schedule is None or not schedule.moves or graph.links is None:
        return None
    graph = as_planned(graph, schedule)
    links = graph.links
    assert links is not None
    here = found or simulate(graph, schedule)
    slower = simulate(graph, schedule, links.slower(SLOWER))
    return Offloaded(
        source=links.source or "not said",
        links=_uses(here, graph),
        host_bytes=here.host_peak_bytes,
        host_room_bytes=links.host_bytes,
        nvme_bytes=here.nvme_peak_bytes,
        nvme_room_bytes=links.nvme_bytes,
        nvme_path=links.nvme_path,
        stalls=len(here.stalls),
        stall_us=here.stall_us,
        longest_us=max((stall.us for stall in here.stalls), default=0.0),
        slower_us=slower.time_us - here.time_us,
        slower_overhead=slower.overhead,
    )


def _uses(found: Simulation, graph: TrainingGraph) -> tuple[LinkUse, ...]:
    uses: list[LinkUse] = []
    for name in LINK_NAMES:
        link = graph.links and graph.links.link(name)
        copies = [copy for copy in found.copies if copy.link == name]
        if link is not None and copies:
            moved_bytes = sum(copy.size_bytes for copy in copies)
            gb_s = link.bytes_per_us / BYTES_PER_US_IN_GB_S
            uses.append(LinkUse(name, len(copies), moved_bytes, gb_s, found.busy_us[name]))
    return tuple(uses)
