"""Where each stay of a value on the host lies in one range of pinned memory.

A stay is from the copy into the host to the step that drops it there. As stays are planned, so are
their places, each at a multiple of a page. Large ones are placed first, each as low as those that
share time with it allow: the order of Pisarchyk and Lee, 2020, arXiv 2001.03288.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Fetch, Free, Offload, Schedule

PAGE_BYTES = 4096


@dataclass(frozen=True)
class HostPlaces:
    """Offsets in bytes by the index of the step that begins a stay, and the range that they need.

    Empty where the host is no range of memory.
    """

    offsets_bytes: dict[int, int] = field(default_factory=dict[int, int])
    size_bytes: int = 0

    def of_step(self, index: int) -> int:
        """The offset of the stay that begins at a step."""
        return self.offsets_bytes.get(index, 0)


@dataclass(frozen=True)
class _Stay:
    start: int
    end: int
    size_bytes: int


def host_places(graph: TrainingGraph, schedule: Schedule) -> HostPlaces:
    """Places for all stays of a schedule's values on the host."""
    stays = _stays(graph, schedule)
    placed: list[tuple[_Stay, int]] = []
    for stay in sorted(stays, key=lambda one: (-one.size_bytes, one.start)):
        placed.append((stay, _lowest(stay, placed)))
    return HostPlaces(
        {stay.start: offset for stay, offset in placed},
        max((offset + stay.size_bytes for stay, offset in placed), default=0),
    )


def _stays(graph: TrainingGraph, schedule: Schedule) -> list[_Stay]:
    begun: dict[str, int] = {}
    stays: list[_Stay] = []

    def end(value: str, at: int) -> None:
        size_bytes = graph.value_by_name[value].size_bytes
        whole_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        stays.append(_Stay(begun.pop(value), at, whole_bytes))

    for i, step in enumerate(schedule.steps):
        if isinstance(step, Offload | Fetch) and step.to == "host":
            begun[step.value] = i
        elif isinstance(step, Free) and step.at == "host":
            end(step.value, i)
    for value in list(begun):
        end(value, len(schedule.steps))
    return stays


def _lowest(stay: _Stay, placed: list[tuple[_Stay, int]]) -> int:
    """The lowest offset at which `stay` shares no byte with one that it shares time with."""
    offset = 0
    beside = [(o, one) for one, o in placed if one.start < stay.end and stay.start < one.end]
    for low, one in sorted(beside, key=lambda pair: pair[0]):
        if offset + stay.size_bytes <= low:
            break
        offset = max(offset, low + one.size_bytes)
    return offset
