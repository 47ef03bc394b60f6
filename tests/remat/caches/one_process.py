"""Train two steps in a process of its own; prints the counts, the losses and the plan's hash."""

from __future__ import annotations

import json

import remat
from remat.graph_capture.devices.meter import CpuMeter
from tests.remat.caches.counted import ROWS, counted, net, rows, stepped
from tests.steps import schedules_of

if __name__ == "__main__":
    CpuMeter.is_quiet = lambda _: False  # a busy machine's costs are not measured anew  # pyright: ignore
    model = net()
    fast = remat.rematerialize(model, budget="70%", solver="cut")
    with counted() as counts:
        found = [stepped(fast, model, rows(count)) for count in (ROWS, ROWS - 16)]
    losses = [float(step[0]) for step in found]
    (first, *_) = schedules_of(fast)
    print(json.dumps([counts.solves, counts.costs, losses, repr(first)]))
