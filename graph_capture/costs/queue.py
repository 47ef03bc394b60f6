"""Host and device as two clocks: what ops cost where the host runs ahead of the device.

One by one, an op takes the longer of two times: the host's, to queue it, and the device's. In a
step, the host queues ahead while the device computes. Sums of the longer ones were 1.05 to 1.28
times the step of a GPT-2 small, at batches of 8 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from remat.graph_capture.costs.cache import OpCost, WholeStepTimes
from remat.graph_capture.costs.step_time import with_costs
from remat.graph_capture.graph import TrainingGraph

_Ops = Iterable[OpCost]


class _Queued(NamedTuple):
    graph: TrainingGraph  # each op at what one more run of it takes
    step: WholeStepTimes  # by the two clocks; nothing was run


def queue_us(ops: _Ops) -> float:
    """Until the device has run all of `ops`, which the host queues in order."""
    host_us = device_us = 0.0
    for one in ops:
        host_us += one.queue_us
        device_us = max(device_us, host_us) + one.cost_us
    return device_us


def in_a_queue(graph: TrainingGraph, costs: Mapping[str, OpCost]) -> _Queued:
    """`costs` are by op; those without one take no time."""
    parts = {"forward": list[OpCost](), "backward": list[OpCost]()}
    for op in graph.ops:
        if op.name in costs:
            parts[op.phase].append(costs[op.name])
    step_us = queue_us([*parts["forward"], *parts["backward"]])
    again_us = queue_us([*parts["forward"], *parts["forward"], *parts["backward"]]) - step_us
    # Judges add costs up. So each op costs what lies as far between its two times as what all of
    # forward adds lies between the sums of both: 0 waits for the device alone, 1 for the host.
    part = _part_of_host(parts["forward"], again_us)
    us = {name: one.cost_us + part * (one.queue_us - one.cost_us) for name, one in costs.items()}
    queued = with_costs(graph, {op.name: us.get(op.name, op.cost_us) for op in graph.ops})
    expected_us = sum(op.cost_us for op in queued.ops if op.phase == "forward")
    return _Queued(queued, WholeStepTimes(step_us, 0.0, again_us, expected_us))


def _part_of_host(ops: _Ops, taken_us: float) -> float:
    device_us = sum(one.cost_us for one in ops)
    more_us = sum(one.queue_us for one in ops) - device_us
    return min(1.0, max(0.0, (taken_us - device_us) / more_us)) if more_us else 0.0


def note_of_queue(share: float, *, is_timed: bool) -> str:
    """`share`: of the sum of all ops, one by one, over the step."""
    how = "as timed" if is_timed else "by two clocks, as it was not timed"
    return f"ops one by one take {share:.2f} times the step {how}: host and device work at once"
