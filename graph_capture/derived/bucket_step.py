"""The step under DDP whose gradients are views of its buckets (``gradient_as_bucket_view=True``).

A gradient is copied into its bucket as soon as autograd has it, and freed. Buckets are resident.

Source: `torch.nn.parallel.DistributedDataParallel` of torch 2.13, read and measured. Li et al.,
PyTorch Distributed, 2020, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from remat.graph_capture.derived.block_units import Unit
from remat.graph_capture.derived.communication import COPY_IN, communication_op
from remat.graph_capture.derived.parameter_groups import unit_of_op
from remat.graph_capture.derived.sharding import UNTIMED
from remat.graph_capture.graph import Op, TrainingGraph


def into_buckets(graph: TrainingGraph, nodes: Sequence[Unit]) -> TrainingGraph:
    """`graph` with gradients that go into buckets.

    Parameters
    ----------
    nodes : blocks that are one autograd node each, which holds its gradients until it ends.
    """
    gradients = {
        name
        for name in graph.outputs
        if graph.value_by_name[name].kind == "gradient" and graph.value_by_name[name].producer
    }
    return msgspec.structs.replace(
        graph,
        ops=tuple(_with_copies(graph, nodes, gradients)),
        outputs=tuple(name for name in graph.outputs if name not in gradients),
        notes=(*graph.notes, UNTIMED),
    )


def _with_copies(graph: TrainingGraph, nodes: Sequence[Unit], gradients: set[str]) -> Iterator[Op]:
    node_of = unit_of_op(nodes)
    made: list[str] = []
    for i, op in enumerate(graph.ops):
        yield op
        made.extend(name for name in op.outputs if name in gradients)
        k = node_of.get(i, -1)
        is_inside = k >= 0 and i != nodes[k].back_stop - 1
        if made and not is_inside:
            module = "" if k < 0 else nodes[k].path
            place = op.name if k < 0 else module
            yield communication_op(COPY_IN, "backward", module, tuple(made), place=place)[0]
            made = []
