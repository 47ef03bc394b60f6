"""What is on the device while each op of a whole step runs, as if copies took no time.

The first of three steps from a `Setting` to a schedule; `streams` gives copies their time, and
`steps` writes the schedule. A value arrives right before its first use and leaves right after the
last before a gap. Gaps are chosen here: what is needed again soonest stays, as far as there is
room, which for a known order moves the fewest bytes (Belady 1966,
https://doi.org/10.1147/sj.52.0078; of pages of one size).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.optimizer_step.graph import GROUP_UPDATE
from remat.graph_capture.optimizer_step.microbatch import Microbatch
from remat.solver.whole_step.setting import Setting

AHEAD = 3
"""Parameters of so many layers have room kept for them, to arrive before their use."""


class DeviceEvent(NamedTuple):
    """One event on the device: a value arrives, an op runs, a value is dropped, or it leaves.

    What leaves goes down; what is dropped has a copy below, or no reader.
    """

    kind: Literal["arrive", "run", "drop", "leave"]
    name: str


@dataclass(frozen=True)
class Residence:
    """The events of one step on the device.

    Attributes
    ----------
    items : in order. live_bytes : on the device while each takes place.
    ops : by name. sizes : of each value. hosted : values of layers that leave and come back.
    """

    items: list[DeviceEvent]
    live_bytes: npt.NDArray[np.int64]
    ops: dict[str, Op]
    sizes: dict[str, int]
    hosted: frozenset[str]

    @classmethod
    def of(
        cls, graph: TrainingGraph, microbatch: Microbatch, setting: Setting, budget_bytes: int
    ) -> Residence:
        """The events for a setting; its `live_bytes` may be above the budget."""
        return _Gaps(graph, microbatch, setting).residence(budget_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device: no copy adds to it, as each only goes where room is."""
        return int(self.live_bytes.max(initial=0))


class _Gaps:
    """Uses of each value on the device, and between which of them it is gone."""

    def __init__(self, graph: TrainingGraph, microbatch: Microbatch, setting: Setting) -> None:
        self.graph, self.setting = graph, setting
        self.order = setting.device_order(microbatch, graph)
        self.sizes = {value.name: value.size_bytes for value in graph.values}
        self.home = {v.name: v.home for v in graph.values if not v.producer}
        self.ops = {op.name: op for op in self.order}
        self.uses: dict[str, list[int]] = {}
        for at, op in enumerate(self.order):
            for name in dict.fromkeys((*op.inputs, *op.outputs)):
                if self.home.get(name) != "device":
                    self.uses.setdefault(name, []).append(at)
        self.hosted = frozenset(self._hosted(microbatch))
        self.gone: set[tuple[str, int]] = set()
        self.weights = (
            AHEAD
            * sorted(g.parameter_bytes for g in microbatch.groups)[len(microbatch.groups) // 2]
        )

    def residence(self, budget_bytes: int) -> Residence:
        """With as many gaps closed as there is room for."""
        self._open()
        items, live_bytes = self._replayed()
        if self.setting.keeping == "near":
            self._close(items, live_bytes, budget_bytes)
            items, live_bytes = self._replayed()
        return Residence(items, live_bytes, self.ops, self.sizes, self.hosted)

    def _hosted(self, microbatch: Microbatch) -> Iterable[str]:
        """What the first layers of each pass save, and what they read of the layers before."""
        first = 0
        for one in self.setting.passes:
            for i in range(first, first + one.microbatches):
                for at, layer in enumerate(microbatch.layers[: one.hosted]):
                    names = (f"S.{at}.{i}", *(f"{name}.{i}" for name in layer.reads))
                    yield from (name for name in names if len(self.uses.get(name, ())) > 1)
            first += one.microbatches

    def _open(self) -> None:
        """Gaps of all that may leave: of activations on the host the longest one."""
        above = [at for at, tier in enumerate(self.setting.state) if tier == "device"]
        kept = {f"G.{at}" for at in (*self.setting.kept_gradients, *above)}
        for name, uses in self.uses.items():
            gaps = [(b - a, a) for a, b in pairwise(uses) if b - a > 1]
            if name in self.hosted and gaps:
                self.gone.add((name, max(gaps)[1]))
            elif name.startswith("G.") and name not in kept:
                # What the device itself updates waits for that where it is.
                last = self.order[uses[-1]].target == GROUP_UPDATE
                self.gone |= {(name, a) for _, a in gaps if not (last and a == uses[-2])}
            elif name in self.home and self.setting.keeping != "stay":
                self.gone |= {(name, a) for _, a in gaps}

    def _close(
        self, items: list[DeviceEvent], live_bytes: npt.NDArray[np.int64], budget_bytes: int
    ) -> None:
        """Keep parameters over their gaps, the shortest first, where room is left for others."""
        places: dict[str, list[int]] = {}
        for k, item in enumerate(items):
            if item.kind in ("arrive", "drop") and item.name in self.home:
                places.setdefault(item.name, []).append(k)
        found = list[tuple[int, int, int, str]]()
        for name, at in places.items():
            found += [(b - a, a, b, name) for a, b in pairwise(at) if items[a].kind == "drop"]
        begins = {(item.name, k): place for k, item, place in _run_places(items)}
        for _, a, b, name in sorted(found):
            if int(live_bytes[a:b].max()) + self.sizes[name] + self.weights <= budget_bytes:
                live_bytes[a:b] += self.sizes[name]
                self.gone.discard((name, begins[name, a]))

    def _replayed(self) -> tuple[list[DeviceEvent], npt.NDArray[np.int64]]:
        """The events, and the bytes on the device while each takes place."""
        there = {name for name, tier in self.home.items() if tier == "device"}
        now = self.graph.resident.total_bytes + sum(self.sizes[name] for name in there)
        items, live = list[DeviceEvent](), list[int]()
        for at, op in enumerate(self.order):
            for name in op.inputs:
                if name not in there:
                    there.add(name)
                    now += self.sizes[name]
                    items.append(DeviceEvent("arrive", name))
                    live.append(now)
            now += sum(self.sizes[name] for name in op.outputs)
            there.update(op.outputs)
            items.append(DeviceEvent("run", op.name))
            live.append(now + op.workspace_bytes)
            for item in self._ends(at, op):
                live.append(now)
                items.append(item)
                there.discard(item.name)
                now -= self.sizes[item.name]
        return items, np.array(live, np.int64)

    def _ends(self, at: int, op: Op) -> list[DeviceEvent]:
        """What goes after an op: first what is dropped, then what leaves."""
        found = list[DeviceEvent]()
        for name in dict.fromkeys((*op.inputs, *op.outputs)):
            if name not in self.uses or name in self.graph.outputs:
                continue
            is_last = self.uses[name][-1] == at
            if not is_last and (name, at) not in self.gone:
                continue
            found.append(
                DeviceEvent("leave" if self._goes_down(name, op, is_last) else "drop", name)
            )
        return sorted(found, key=lambda item: item.kind == "leave")

    def _goes_down(self, name: str, op: Op, is_last: bool) -> bool:
        """Whether the device holds what no lower tier has."""
        if op.target == GROUP_UPDATE:
            return name in op.updates
        if name.startswith("G."):
            return True
        return name in self.hosted and not is_last


def _run_places(items: list[DeviceEvent]) -> Iterable[tuple[int, DeviceEvent, int]]:
    """Each event with the number of the op that ran last before it."""
    place = -1
    for k, item in enumerate(items):
        place += item.kind == "run"
        yield k, item, place
