"""The graph of a step at a size that was not captured, from two captures at other sizes.

Bytes and prices are taken to be affine in the size, so two captures tell those at any other. That
holds for a batch. In the length of a sequence attention is not affine, so the graph is a guess, to
be checked by a capture.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value

Interpolated = Callable[[float, float], float]
"""From a figure at two sizes to the one at the size that is asked for; never below 0."""


def is_same_step(first: TrainingGraph, second: TrainingGraph) -> bool:
    """Whether two captures have the same ops and values; their sizes may differ."""
    same_values = [v.name for v in first.values] == [v.name for v in second.values]
    return same_values and [_facts(op) for op in first.ops] == [_facts(op) for op in second.ops]


def graph_at(
    size: int, one: tuple[int, TrainingGraph], two: tuple[int, TrainingGraph]
) -> TrainingGraph:
    """The step at `size`, from (size, graph) at two others for which `is_same_step` holds.

    Shapes stay those of the first, so the result is for predictions alone.
    """
    (size_1, first), (size_2, second) = one, two

    def at(x: float, y: float) -> float:
        return max(x + (y - x) * (size - size_1) / (size_2 - size_1), 0.0)

    values = tuple(_value_at(at, v, w) for v, w in zip(first.values, second.values, strict=True))
    ops = tuple(_op_at(at, a, b) for a, b in zip(first.ops, second.ops, strict=True))
    resident = Resident(
        **{
            name: round(at(size_bytes, getattr(second.resident, name)))
            for name, size_bytes in msgspec.structs.asdict(first.resident).items()
        }
    )
    return msgspec.structs.replace(first, ops=ops, values=values, resident=resident)


def _facts(op: Op) -> tuple[object, ...]:
    return op.name, op.target, op.phase, op.inputs, op.outputs, op.pinned


def _value_at(at: Interpolated, first: Value, second: Value) -> Value:
    return msgspec.structs.replace(first, size_bytes=round(at(first.size_bytes, second.size_bytes)))


def _op_at(at: Interpolated, first: Op, second: Op) -> Op:
    return msgspec.structs.replace(
        first,
        cost_us=at(first.cost_us, second.cost_us),
        workspace_bytes=round(at(first.workspace_bytes, second.workspace_bytes)),
    )
