"""Random graphs, and random valid schedules that compute, copy and drop in all three tiers.

All times are whole numbers: sizes are multiples of 100 bytes, and rates divide them. So two ways
of adding them up agree to the bit.
"""

from __future__ import annotations

import random

from remat.graph_capture.graph import TIERS, Link, Links, Op, Resident, Tier, TrainingGraph, Value
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Step

BELOW: dict[Tier, Tier] = {"device": "host", "host": "nvme"}
ROOM_BYTES = 1 << 40


def moving_graph(source: random.Random) -> TrainingGraph:
    """Ops with 1 or 2 outputs, some of which the host can run too; some values have a home."""
    n_ops = source.randint(3, 14)
    values = [
        Value(f"w{i}", source.randint(1, 60) * 100, kind="parameter", home=source.choice(TIERS))
        for i in range(source.randint(0, 2))
    ]
    ops: list[Op] = []
    for i in range(n_ops):
        names = [value.name for value in values]
        inputs = source.sample(names, min(len(names), source.randint(1, 3)))
        outputs = tuple(f"v{i}_{j}" for j in range(source.choice((1, 1, 1, 2))))
        on_host = float(source.randint(1, 90)) if source.random() < 0.6 else None
        phase = "forward" if i < n_ops // 2 else "backward"
        costs = float(source.randint(0, 50)), source.randint(0, 5) * 100
        op = Op(f"op{i}", "t", phase, tuple(inputs), outputs, *costs, host_cost_us=on_host)
        ops.append(op)
        values += [Value(name, source.randint(1, 60) * 100, f"op{i}") for name in outputs]
    resident = Resident(parameters_bytes=1000)
    return TrainingGraph(
        "moving", tuple(ops), tuple(values), (), (values[-1].name,), resident, links=links(source)
    )


def links(source: random.Random) -> Links:
    """Four links of random rates and latencies; room for all."""
    d2h, h2d, write, read = (
        Link(source.choice((20.0, 50.0, 100.0)), source.choice((0.0, 3.0))) for _ in range(4)
    )
    return Links(d2h, h2d, ROOM_BYTES, write, read, ROOM_BYTES)


class MovingWalk:
    """Writes one valid schedule, and knows what each tier holds."""

    def __init__(self, graph: TrainingGraph, source: random.Random) -> None:
        self.graph, self.source = graph, source
        self.steps: list[Step] = []
        self.holds: dict[Tier, dict[str, None]] = {tier: {} for tier in TIERS}
        self.home = {value.name: value.home for value in graph.values if value.home}
        for name, tier in self.home.items():
            self.holds[tier][name] = None

    def run(self) -> list[Step]:
        """All ops in turn, and what each leaves to chance after it."""
        for op in self.graph.ops:
            at_host = op.host_cost_us is not None and all(
                v in self.holds["host"] for v in op.inputs
            )
            if at_host and self.source.random() < 0.7:
                self._compute(op, "host")
            else:
                for name in op.inputs:
                    self._bring(name)
                self._compute(op, "device")
            for _ in range(self.source.randint(0, 6)):
                self._wander()
        for name in self.graph.outputs:
            self._bring(name)
        return self.steps

    def _compute(self, op: Op, at: Tier) -> None:
        self.steps.append(Compute(op.name, at))
        self.holds[at].update(dict.fromkeys(op.outputs))

    def _bring(self, name: str) -> None:
        """Have a value on the device: by copies from below, or by making it again."""
        if name in self.holds["device"]:
            return
        on_host, on_nvme = (name in self.holds[tier] for tier in ("host", "nvme"))
        producer = self.graph.value_by_name[name].producer
        if (on_host or on_nvme) and (not producer or self.source.random() < 0.8):
            if not on_host:
                self._copy(Fetch(name, "host"))
            self._copy(Fetch(name))
            return
        op = self.graph.ops[self.graph.op_index[producer]]
        for below in op.inputs:
            self._bring(below)
        self._compute(op, "device")

    def _copy(self, step: Offload | Fetch) -> None:
        self.steps.append(step)
        self.holds[step.to][step.value] = None

    def _wander(self) -> None:
        act, upper = self.source.random(), self.source.choice(("device", "host"))
        lower = BELOW[upper]
        if act < 0.4:
            self._copy_one(upper, lower, Offload)
        elif act < 0.55:
            self._copy_one(lower, upper, Fetch)
        else:
            self._drop_one(self.source.choice(("device", "host", "host", "nvme")))

    def _copy_one(self, here: Tier, there: Tier, kind: type[Offload] | type[Fetch]) -> None:
        names = [name for name in self.holds[here] if name not in self.holds[there]]
        if names:
            self._copy(kind(self.source.choice(names), there))

    def _drop_one(self, tier: Tier) -> None:
        """Drop a copy, of what has a home none there."""
        names = [name for name in self.holds[tier] if self.home.get(name) != tier]
        if names:
            name = self.source.choice(names)
            self.steps.append(Free(name, tier))
            del self.holds[tier][name]
