"""Constants of joint graphs that follow from a number by a known rule."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from remat.graph_capture.float_inputs.inputs import Argument
from remat.graph_capture.float_inputs.traced_float import Log, Step
from remat.graph_capture.joint.dropout import scale_of_eager
from remat.graph_capture.joint.tensor_bits import bits_of

_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


_RULES: tuple[Callable[[float], float], ...] = (
    lambda x: x,
    lambda x: -x,
    lambda x: 1 - x,
    lambda x: 1.0 / (1.0 - x),
    lambda x: 1.0 / x,
    lambda x: x - 1,
    lambda x: x * x,
    *(functools.partial(scale_of_eager, dtype=dtype) for dtype in _PRECISIONS),
)
"""What torch itself computes of a number before it becomes an op's argument."""


@dataclass(frozen=True)
class Probe:
    """One trace: its joint graph, what it leaves behind, and what became of the numbers.

    Attributes
    ----------
    looked_at : values of tensors that code has looked at, and those that they come from.
    """

    gm: fx.GraphModule
    left: Any
    looked_at: bytes
    log: Log


class Arguments:
    """Matches constants of the joint graphs with what the program computes."""

    def __init__(self, steps: Sequence[Step], results: Sequence[Sequence[Any]]) -> None:
        self.arguments: list[Argument] = []
        self.at: dict[tuple[str, int], int] = {}
        self._known: dict[tuple[str, ...], int] = {}
        self._numbers = [i for i, step in enumerate(steps) if not step.is_asked]
        self._results = results

    def read(self, probes: Sequence[Probe]) -> str:
        """Compare the traces node by node; why they are not alike, or empty."""
        graphs = [list(probe.gm.graph.nodes) for probe in probes]
        if any(len(graph) != len(graphs[0]) for graph in graphs):
            return "torch runs other ops for a value nearby"
        for nodes in zip(*graphs, strict=True):
            if why := self._read_node(nodes, [probe.gm for probe in probes]):
                return why
        if any(not _are_equal(probe.left, probes[0].left) for probe in probes):
            return "a result or an attribute that forward sets depends on it"
        if any(probe.looked_at != probes[0].looked_at for probe in probes):
            return "forward looks at the values of a tensor that is made of it"
        return ""

    def _read_node(self, nodes: Sequence[fx.Node], gms: Sequence[fx.GraphModule]) -> str:
        first = nodes[0]
        flat = [pytree.tree_flatten((tuple(n.args), dict(n.kwargs))) for n in nodes]
        same = all((n.op, n.target, n.name) == (first.op, first.target, first.name) for n in nodes)
        if not same or any(spec != flat[0][1] for _, spec in flat):
            return "torch runs other ops for a value nearby"
        if first.op == "get_attr":
            held = [getattr(gm, str(first.target)) for gm in gms]
            return "" if _are_equal_constants(held) else "a constant tensor depends on it"
        for i, leaves in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            if all(_is_same_leaf(leaf, leaves[0]) for leaf in leaves):
                continue
            index = self._argument(leaves) if all(type(x) is float for x in leaves) else None
            if index is None or first.op == "output":
                return f"{first.target} takes {leaves[0]!r}, which follows from it by no known rule"
            self.at[first.name, i] = index
        return ""

    def _argument(self, constants: Sequence[float]) -> int | None:
        key = tuple(map(repr, constants))
        if key not in self._known:
            found = self._rule(constants)
            if found is None:
                return None
            self._known[key] = len(self.arguments)
            self.arguments.append(found)
        return self._known[key]

    def _rule(self, constants: Sequence[float]) -> Argument | None:
        for step in self._numbers:
            values = [results[step] for results in self._results]
            for rule in (*_RULES, *_scaled(values[0], constants[0])):
                if _fits(rule, values, constants):
                    return Argument(step, rule)
        return None


def _scaled(value: float, constant: float) -> Iterator[Callable[[float], float]]:
    """Rules that multiply or divide by a whole number, such as a number of classes."""
    for big, small in ((value, constant), (constant, value)):
        whole = round(big / small) if small and math.isfinite(big / small) else 0
        if abs(whole) > 1:
            scale = operator.truediv if big is value else operator.mul
            yield functools.partial(_swapped, scale, whole)


def _swapped(scale: Callable[[float, int], float], whole: int, x: float) -> float:
    return scale(x, whole)


def _fits(rule: Callable[[float], float], values: Sequence[float], found: Sequence[float]) -> bool:
    try:
        return all(repr(rule(x)) == repr(y) for x, y in zip(values, found, strict=True))
    except (ArithmeticError, ValueError):
        return False


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node):
        return isinstance(other, fx.Node) and one.name == other.name
    return type(one) is type(other) and (repr(one) == repr(other))


def _are_equal_constants(held: Sequence[Any]) -> bool:
    first = held[0]
    if isinstance(first, fx.GraphModule):
        return all(one.code == first.code for one in held)
    return all(_are_equal(one, first) for one in held)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two constants, or trees of them, are the same; tensors by their bits."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return is_alike and torch.equal(bits_of(one), bits_of(other))
    return type(one) is type(other) and repr(one) == repr(other)
