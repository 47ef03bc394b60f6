"""What backward of a block leaves for later where the gradients of weights are made apart.

A zero-bubble schedule runs backward in two parts: I makes the gradient of the block's input, which
the stage before waits for, and W those of the weights, where the rank would wait (Qi et al. 2023,
https://arxiv.org/abs/2401.10241). W has the products that I does without, and what reads their
results. All else runs with I: held for W, a sum over a batch is smaller than what it is of.

The rewriter cuts a backward graph for the fewest bytes held (`rewriter/split_backward`); this is
that cut but for ops that make no product and copy, of which either side holds as much.
"""

from __future__ import annotations

from typing import NamedTuple

from remat.graph_capture.graph import Op, TrainingGraph
from remat.solver.attention_core import op_kind

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "_convolution",
     "cudnn_convolution", "convolution_overrideable", "_slow_conv2d_forward",
     "convolution_backward"}
)  # fmt: skip
"""With attention, those whose floating-point operations torch counts
(torch/utils/flop_counter.py)."""


class WeightsLater(NamedTuple):
    """Of one microbatch.

    Attributes
    ----------
    weight_us : time of W. held_bytes : from I to W.
    """

    weight_us: float = 0.0
    held_bytes: int = 0


def is_product(target: str) -> bool:
    """Whether an op is one of those that models spend their time in."""
    kind = op_kind(target)
    return kind in PRODUCTS or "attention" in kind


def weights_later(graph: TrainingGraph, border_gradient: str) -> WeightsLater:
    """What W of a block takes, if nothing is computed again.

    Parameters
    ----------
    border_gradient : the value that is the gradient of what the block reads.
    """
    late = _weight_ops(graph, border_gradient)
    size_of = {value.name: value.size_bytes for value in graph.values if value.producer}
    made = {name for op in late for name in op.outputs}
    held = {name for op in late for name in op.inputs if name in size_of and name not in made}
    return WeightsLater(sum(op.cost_us for op in late), sum(size_of[name] for name in held))


def _weight_ops(graph: TrainingGraph, border_gradient: str) -> list[Op]:
    """The ops of W, in order."""
    needed = _needed_for(graph, border_gradient)
    late: list[Op] = []
    later = set[str]()
    for op in graph.ops[graph.n_forward :]:
        reads_late = not later.isdisjoint(op.inputs)
        if op.name not in needed and (reads_late or is_product(op.target)):
            late.append(op)
            later.update(op.outputs)
    return late


def _needed_for(graph: TrainingGraph, value: str) -> set[str]:
    """Names of the ops that a value needs."""
    producer = {name: op for op in graph.ops for name in op.outputs}
    found = set[str]()
    waiting = [value]
    while waiting:
        op = producer.get(waiting.pop())
        if op is not None and op.name not in found:
            found.add(op.name)
            waiting += op.inputs
    return found
