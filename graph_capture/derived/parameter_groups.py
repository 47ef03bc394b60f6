"""Parameters that a wrapper gathers together, and gradients that it reduces together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from remat.graph_capture.derived.block_units import Unit
from remat.graph_capture.derived.sharding import MASTER_BYTES, Sharding, element_bytes
from remat.graph_capture.graph import TrainingGraph, Value


@dataclass
class ParameterGroup:
    """Parameters that are gathered together.

    Attributes
    ----------
    path : of the module that is wrapped; empty for the model, the root.
    parameters_bytes, gathered_bytes : without and with FSDP2's padding, in the dtype of the step.
    shard_bytes : of one rank's part, as it is held between steps.
    gradients : in the order of the step's outputs.
    """

    path: str
    parameters_bytes: int = 0
    gathered_bytes: int = 0
    shard_bytes: int = 0
    gradients: list[Value] = field(default_factory=list[Value])

    def add(self, value: Value, sharding: Sharding) -> None:
        """Count a parameter."""
        elements, size = sharding.shard_elements(value.shape), element_bytes(value.dtype)
        self.gathered_bytes += sharding.shard_ranks * elements * size
        self.shard_bytes += elements * (MASTER_BYTES if sharding.param_dtype else size)
        self.parameters_bytes += math.prod(value.shape) * size

    def reduced_bytes(self, sharding: Sharding) -> tuple[int, int]:
        """Bytes of the buffer that gradients are reduced in, and of this rank's part as it is held.

        The buffer is padded as parameters are, if each of them has a gradient. It has
        `reduce_dtype`; the part is put into the dtype that parameters are held in.
        """
        size_bytes, n = sum(value.size_bytes for value in self.gradients), sharding.shard_ranks
        if size_bytes == self.parameters_bytes:
            size_bytes = self.gathered_bytes
        size_bytes = -(-size_bytes // n) * n
        own = element_bytes(self.gradients[0].dtype)
        elements = size_bytes // own
        reduced = element_bytes(sharding.reduce_dtype) if sharding.reduce_dtype else own
        held = MASTER_BYTES if sharding.param_dtype else own
        return elements * reduced, elements // n * held


def wrapped_groups(
    graph: TrainingGraph, units: Sequence[Unit], sharding: Sharding
) -> tuple[list[ParameterGroup], ParameterGroup]:
    """A group for each unit, and that of the root: what no single unit reads or makes."""
    groups, root = [ParameterGroup(unit.path) for unit in units], ParameterGroup("")
    unit_of = unit_of_op(units)
    readers: dict[str, set[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            readers.setdefault(name, set()).add(unit_of.get(i, -1))
    for value in graph.values:
        if value.kind == "parameter":
            own = readers.get(value.name, set())
            k = own.pop() if len(own) == 1 else -1
            (root if k < 0 else groups[k]).add(value, sharding)
    for name in dict.fromkeys(graph.outputs):
        value = graph.value_by_name[name]
        if value.kind == "gradient":
            k = unit_of.get(graph.op_index[value.producer], -1)
            (root if k < 0 else groups[k]).gradients.append(value)
    return groups, root


def unit_of_op(units: Sequence[Unit]) -> dict[int, int]:
    """The place of its unit for each op that is in one, forward and backward."""
    return {
        i: k
        for k, unit in enumerate(units)
        for i in (*range(unit.start, unit.stop), *range(unit.back_start, unit.back_stop))
    }
