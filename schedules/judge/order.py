"""The rules on which op may run when, whatever memory holds.

First runs may come in any order that gives the same bits. Ops that draw share one random stream,
and ops with effects share the buffers: these keep their captured order. `remat.tangents` opens
backward. `tests/rewriter/test_reordered.py` trains random orders against eager.
"""

from __future__ import annotations

from typing import NoReturn

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import UPDATE, Op, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.verdicts.globs import asked_again, is_freed


class Order:
    """The runs of a schedule so far.

    Attributes
    ----------
    computed : names of ops that ran. forward_left : ops of forward that have not.
    updated : by parameter, the op that has updated it.
    """

    def __init__(self, graph: TrainingGraph, schedule: Schedule) -> None:
        self.graph, self.asked = graph, asked_again(schedule)
        self.computed, self.updated = set[str](), dict[str, str]()
        self.forward_left = graph.n_forward
        self._ordered, self._due = set(graph.ordered_ops), iter(graph.ordered_ops)
        self._opening = {op.name for op in graph.ops if op.target == "remat.tangents"}

    def run(self, i: int, op: Op) -> bool:
        """Count a run, and raise `ScheduleError` if it may not be now; whether it is the first."""
        is_first = op.name not in self.computed
        if not (is_first or is_freed(op, self.asked)) and (op.pinned or op.updates):
            refuse(i, f"op {op.name} must not run twice: {op.pinned or 'it updates'}")
        for value in op.inputs if self.updated else ():
            if value in self.updated:
                refuse(i, f"op {op.name} reads {value}, which op {self.updated[value]} has updated")
        if op.phase == "backward" and self.forward_left:
            refuse(i, f"backward op {op.name} runs before forward ends")
        if is_first:
            self._run_first(i, op)
        return is_first

    def _run_first(self, i: int, op: Op) -> None:
        if op.name in self._ordered and op.name != (due := next(self._due)):
            refuse(i, f"op {op.name} must first run after {due}, as captured")
        self.computed.add(op.name)
        if op.phase != "forward" and not self._opening <= self.computed:
            refuse(i, f"op {op.name} runs before tangents")
        if op.target == UPDATE:
            given = (self.graph.value_by_name[name] for name in op.inputs)
            self.updated |= {v.name: op.name for v in given if not v.producer and v.home is None}
        self.forward_left -= op.phase == "forward"


def refuse(i: int, message: str) -> NoReturn:
    """Raise `ScheduleError` for a step."""
    raise ScheduleError(f"invalid schedule at step {i}: {message}")
