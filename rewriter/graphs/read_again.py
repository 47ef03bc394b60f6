"""Which inputs of a step backward reads to make values again, by their places.

Eager has saved what was made of them. So it does not notice, and need not, if they change before
backward: an input buffer that the next batch is copied into, a weight that is changed by ``.data``.
"""

from __future__ import annotations

from torch import fx

from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import is_tangent
from remat.graph_capture.over_ranks.dtensors import is_beside_local_part
from remat.schedules.kept_in_forward import end_of_forward
from remat.schedules.schedule import Compute, Schedule


def read_again(joint: Joint, schedule: Schedule) -> tuple[int, ...]:
    """Places of the inputs that ops of forward read which run in backward; parameters first."""
    graph, end = joint.graph, end_of_forward(joint.graph, schedule)
    again = {step.op for step in schedule.steps[end:] if isinstance(step, Compute)}
    ops = [graph.ops[graph.op_index[name]] for name in again]
    values = {value for op in ops if op.phase == "forward" for value in op.inputs}
    read = {joint.base_of_value.get(value) for value in values}
    return tuple(i for i, node in enumerate(_inputs(joint)) if node in read)


def _inputs(joint: Joint) -> list[fx.Node]:
    """The inputs' nodes; of a DTensor, that of its local part alone."""
    given = joint.module.graph.find_nodes(op="placeholder")
    return [n for n in given if not is_tangent(n) and not is_beside_local_part(n.meta.get("desc"))]
