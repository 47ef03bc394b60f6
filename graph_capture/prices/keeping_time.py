"""What it costs to keep results for backward, beside dropping them.

A result that is dropped leaves its memory, near the core, to the next one. Where a result is kept,
the next one is written to memory farther away. Prices of single ops know nothing of this, so
computing again seems to cost more than it does. In a mixture of experts a product of 1 MiB takes
620 us in the step that keeps everything, 537 each time it runs in a plan for 40 % of the peak, and
483 alone. Plans for 48 MB and 59 MB were said to take 13.4 % and 10.1 %, and took 9.4 % and 7.7 %.

So forward is run as it keeps what backward reads, and as it drops it. The difference is taken off
the prices of what is kept, and `booking.py` adds it to the step. The two runs take turns, in both
orders. With five runs of each in a row, the difference of an LSTM's forwards of 160 ms came out
between -8 and +7 % of a step on a shared core; as a median of fifteen differences, between -0.5 and
+1.4 %.

Tried and not taken: prices with caches warm, and a price for each byte that is read again.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import copy_of, is_getitem

Costs = Mapping[str, float]
"""The time of one run of each op, in us, by its name."""
LEAST = 0.5
"""Part of its price that every op keeps at least."""


def forwards(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward alone, twice: one that keeps what backward reads, and one that drops it.

    The time of keeping is what the first takes longer.
    """
    own: list[str] = []
    keeping = copy_of(joint.module, lambda graph: own.extend(_keep_forward(joint, graph)))

    def drop(graph: fx.Graph) -> None:
        graph.output_node().args = (tuple(n for n in graph.nodes if n.name in own_names),)

    own_names = set(own)
    return keeping, copy_of(keeping, drop)


def less_for_kept(graph: TrainingGraph, costs: Costs, saved_us: float) -> Costs:
    """`costs` with `saved_us` taken off those of values kept for backward, in proportion to bytes.

    Every op keeps `LEAST` of its cost, so that less than `saved_us` may be taken off.
    """
    of_op = bytes_for_backward(graph)
    us_per_byte = saved_us / max(1, sum(of_op.values()))
    return {
        name: max(LEAST * cost_us, cost_us - us_per_byte * of_op.get(name, 0))
        for name, cost_us in costs.items()
    }


def bytes_for_backward(graph: TrainingGraph) -> dict[str, int]:
    """Bytes that backward reads of the results of each forward op."""
    read = {name for op in graph.ops if op.phase == "backward" for name in op.inputs}
    sizes = {value.name: value.size_bytes for value in graph.values if value.name in read}
    return {
        op.name: sum(sizes.get(name, 0) for name in op.outputs)
        for op in graph.ops
        if op.phase == "forward"
    }


def _keep_forward(joint: Joint, graph: fx.Graph) -> list[str]:
    """Leave forward alone of `graph`, which also returns what backward reads.

    Returns the names of the nodes of forward's own results.
    """
    phases = {op.name: op.phase for op in joint.graph.ops}
    backward = {n.name for name, n in joint.node_of_op.items() if phases[name] == "backward"}
    nodes = list(graph.nodes)
    end = next((i for i, node in enumerate(nodes) if node.name in backward), len(nodes) - 1)
    forward, later = nodes[:end], nodes[end:-1]
    # A node with several results is no tensor to return: its parts are.
    made = [node for node in forward if node.op == "call_function" and not _has_parts(node)]
    after = {*later, nodes[-1]}
    returned = [node for node in made if any(user in after for user in node.users)]
    own = [node.name for node in returned if nodes[-1] in node.users]
    nodes[-1].args = (tuple(returned),)
    for node in reversed(later):
        if node.op != "placeholder":
            graph.erase_node(node)
    return own


def _has_parts(node: fx.Node) -> bool:
    return any(is_getitem(user) for user in node.users)
