"""Whether forward does at its next call what it does at its first, given what the first has set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import draws_randomness
from remat.graph_capture.tracing.results import Repeats
from remat.graph_capture.tracing.side_effects.carried import Carried


class Unread:
    """Stands in an attribute that forward sets, to see whether it reads it before it does."""

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"what an earlier step left is read ({name})")


def doubtful(
    carried: Iterable[Carried],
    results: int,
    end: fx.Node,
    repeats: Repeats | None,
    constants: frozenset[int],
) -> list[Carried]:
    """Attributes that forward may read from an earlier step, and sets to something else.

    That is what it sets from its batch, and what the graph reads as it was before. What depends on
    neither batch, parameters nor random numbers, as a mask that is made at the first call, is the
    same at each step.

    Parameters
    ----------
    constants : storages of the tensors that the graph holds itself.
    results : how many of the joint graph's are forward's, of which the carried tensors are last.
    end : its output node. repeats : where the results repeat a tensor.
    """
    number = sum(one.tensors for one in carried)
    if not number:
        return []
    described = _forward_results(end, results)
    plain = [(what.idx, node) for what, node in described if hasattr(what, "idx")]
    distinct = [node for _, node in sorted(plain, key=lambda pair: pair[0])]
    nodes = (repeats.of_leaves(distinct) if repeats else distinct)[-number:]
    found: list[Carried] = []
    for one in carried:
        own, nodes = nodes[: one.tensors], nodes[one.tensors :]
        is_another = any(_depends_on_input(node) for node in own)
        if one.is_read and (is_another or one.before & constants):
            found.append(one)
    return found


def _forward_results(end: fx.Node, count: int) -> list[tuple[Any, Any]]:
    outputs = end.args[0]
    assert isinstance(outputs, (tuple, list))
    return list(zip(end.meta["desc"][:count], outputs[:count], strict=True))


def _depends_on_input(node: Any) -> bool:
    stack, seen = [node], set[Any]()
    while stack:
        one = stack.pop()
        if not isinstance(one, fx.Node) or one in seen:
            continue
        seen.add(one)
        if one.op == "placeholder" or draws_randomness(one):
            return True
        stack.extend(one.all_input_nodes)
    return False


def is_same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Whether two traces have the same ops on the same values, numbers and tensors of their own."""
    if len(a.graph.nodes) != len(b.graph.nodes):
        return False
    return all(_is_same_node(a, m, b, n) for m, n in zip(a.graph.nodes, b.graph.nodes, strict=True))


def _is_same_node(a: fx.GraphModule, m: fx.Node, b: fx.GraphModule, n: fx.Node) -> bool:
    if (m.op, m.name, str(m.target)) != (n.op, n.name, str(n.target)):
        return False
    if m.op == "get_attr":
        return _is_same_constant(getattr(a, str(m.target)), getattr(b, str(n.target)))
    # By their texts: nodes are named, and NaN is NaN.
    return repr((m.args, m.kwargs)) == repr((n.args, n.kwargs))


def _is_same_constant(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one is other:
        return one is other
    same = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
    return same and one.layout is torch.strided and torch.equal(one, other)
