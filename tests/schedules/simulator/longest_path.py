"""A second opinion on time: each step is a task that begins when all that it waits for has ended.

Written from the rules and not from the simulator. It has no clock of an engine, only tasks and what
comes before them, and it looks for room below the device by trying the moments at which some is
freed. It also says when bytes are really in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from remat.graph_capture.graph import LinkName, Links, Tier, TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Step

WAYS: dict[tuple[type, Tier], tuple[Tier, LinkName]] = {
    (Offload, "host"): ("device", "d2h"),
    (Fetch, "device"): ("host", "h2d"),
    (Offload, "nvme"): ("host", "write"),
    (Fetch, "host"): ("nvme", "read"),
}


class Span(NamedTuple):
    """Bytes of a tier in use from one time to another."""

    tier: Tier
    begin_us: float
    end_us: float
    size_bytes: int


@dataclass
class LongestPath:
    """Tasks so far.

    Attributes
    ----------
    ends : when each step's task ends. last : the last task of each engine.
    born : the task that wrote each copy, and when its bytes were taken. readers : tasks that read
        each copy below the device, or copy it from there. spans : uses of memory that are over.
    """

    graph: TrainingGraph
    links: Links
    ends: list[float] = field(default_factory=list[float])
    last: dict[str, int] = field(default_factory=dict[str, int])
    born: dict[tuple[Tier, str], tuple[int | None, float]] = field(default_factory=dict)
    readers: dict[tuple[Tier, str], list[int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list[Span])

    def __post_init__(self) -> None:
        for value in self.graph.values:
            if value.home:
                self.born[value.home, value.name] = (None, 0.0)

    def run(self, steps: list[Step]) -> float:
        """When the last task ends."""
        for i, step in enumerate(steps):
            if isinstance(step, Compute):
                self._compute(i, step)
            elif isinstance(step, Free):
                self._free(i, step)
            else:
                self._copy(i, step)
        for (tier, name), (_, begin_us) in self.born.items():
            self.spans.append(Span(tier, begin_us, float("inf"), self._size(name)))
        return max(self.ends, default=0.0)

    def most_used_bytes(self, tier: Tier) -> int:
        """The most bytes in use at once; at one moment what ends goes before what begins."""
        events: list[tuple[float, int, int]] = []
        for span in self.spans:
            if span.tier == tier and span.end_us > span.begin_us:
                events.append((span.begin_us, 1, span.size_bytes))
                events.append((span.end_us, 0, -span.size_bytes))
        now = most = 0
        for _, _, size_bytes in sorted(events):
            now += size_bytes
            most = max(most, now)
        return most

    def _size(self, name: str) -> int:
        return self.graph.value_by_name[name].size_bytes

    def _after(self, tasks: list[int | None]) -> float:
        return max((self.ends[task] for task in tasks if task is not None), default=0.0)

    def _compute(self, i: int, step: Compute) -> None:
        op, at = self.graph.ops[self.graph.op_index[step.op]], step.at
        fresh = [name for name in op.outputs if (at, name) not in self.born]
        begin_us = self._after([self.last.get(at), *(self.born[at, v][0] for v in op.inputs)])
        begin_us = self._with_room(at, begin_us, sum(map(self._size, fresh)))
        cost_us = op.cost_us if at == "device" else op.host_cost_us
        assert cost_us is not None
        self.ends.append(begin_us + cost_us)
        self.last[at] = i
        for name in fresh:
            self.born[at, name] = (i, begin_us)
        if at == "device":
            again = sum(self._size(name) for name in op.outputs if name not in fresh)
            self.spans.append(Span(at, begin_us, self.ends[i], again + op.workspace_bytes))
        else:
            self._read(i, [(at, name) for name in op.inputs])

    def _free(self, i: int, step: Free) -> None:
        key = step.at, step.value
        writer, begin_us = self.born.pop(key)
        free_us = self._after([writer, *self.readers.pop(key, [])])
        if step.at == "device":
            free_us = max(free_us, self._after([self.last.get("device")]))
            self.last["device"] = i
        self.ends.append(free_us if step.at == "device" else 0.0)
        self.spans.append(Span(step.at, begin_us, free_us, self._size(step.value)))

    def _copy(self, i: int, step: Offload | Fetch) -> None:
        source, name = WAYS[type(step), step.to]
        link = self.links.link(name)
        assert link is not None
        before = [self.last.get(name), self.born[source, step.value][0]]
        if "device" in (source, step.to):
            before.append(self.last.get("device"))
        begin_us = self._with_room(step.to, self._after(before), self._size(step.value))
        self.ends.append(begin_us + link.latency_us + self._size(step.value) / link.bytes_per_us)
        self.last[name] = i
        self.born[step.to, step.value] = (i, begin_us)
        self._read(i, [(source, step.value)])

    def _read(self, i: int, keys: list[tuple[Tier, str]]) -> None:
        for key in keys:
            self.readers.setdefault(key, []).append(i)

    def _with_room(self, tier: Tier, begin_us: float, size_bytes: int) -> float:
        """From `begin_us` on the first moment at which the tier has room for so many bytes more."""
        if tier == "device" or not size_bytes:
            return begin_us
        held = sum(self._size(name) for at, name in self.born if at == tier)
        over = [span for span in self.spans if span.tier == tier]
        for moment in sorted({begin_us, *(span.end_us for span in over)}):
            used = held + sum(span.size_bytes for span in over if span.end_us > moment)
            if moment >= begin_us and used + size_bytes <= self.links.room_bytes(tier):
                return moment
        raise AssertionError(f"no room on the {tier}, ever")
