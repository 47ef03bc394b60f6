"""Label smoothing around a head's loss: what it reads of the probabilities, and what it hands back.

It adds the sum of each row's logarithms to the loss, weighted where classes are. That sum is made
by a piece too. All else that label smoothing does has one number a row, and stays as captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class Smoothing:
    """The nodes of label smoothing that have a number for each row and class.

    Attributes
    ----------
    row_sum : the node of the sums of all rows, (m,). row_term : its gradient, (m, 1).
    total : the node that adds its part to that of the loss.
    forward, backward : nodes that only serve these, each before those that read it.
    """

    row_sum: fx.Node
    row_term: fx.Node
    total: fx.Node
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]


def find_smoothing(
    readers: Sequence[fx.Node], of_softmax: fx.Node, of_loss: fx.Node, class_weight: Any
) -> Smoothing | None:
    """The label smoothing among what reads the logarithms; None where there is none that is known.

    Parameters
    ----------
    readers : of the logarithms of the probabilities. of_softmax : the node of their backward.
    of_loss : the node of the loss's backward. class_weight : that the loss reads, or None.
    """
    total = of_softmax.args[0]
    if not isinstance(total, fx.Node) or not _reads(total, aten.add.Tensor, of_loss):
        return None
    part = next(one for one in total.args if one is not of_loss)
    scaled = _unscaled(part, class_weight)
    summed = [_summed(reader, class_weight) for reader in readers]
    found = [one for one in summed if one is not None]
    if scaled is None or len(found) != 1 or list(total.users) != [of_softmax]:
        return None
    expanded, *back = scaled
    row_term = expanded.args[0]
    if expanded.target is not aten.expand.default or not isinstance(row_term, fx.Node):
        return None
    n_rows = of_softmax.meta["val"].shape[0]
    if list(row_term.meta["val"].shape) != [n_rows, 1] or len(expanded.users) != 1:
        return None
    return Smoothing(found[0][-1], row_term, total, found[0], (expanded, *back, total))


def identity_of(argument: Any) -> Any:
    """A node by its name, a constant by that of its tensor, which several nodes may read."""
    if not isinstance(argument, fx.Node):
        return argument
    return str(argument.target) if argument.op == "get_attr" else argument.name


def _reads(node: fx.Node, target: Any, read: fx.Node) -> bool:
    return node.target is target and not node.kwargs and node.args.count(read) == 1


def _unscaled(part: Any, class_weight: Any) -> tuple[fx.Node, ...] | None:
    """What is multiplied by the weights of the classes, and that product; itself without weights.

    None where it is multiplied by something else.
    """
    if not isinstance(part, fx.Node):
        return None
    if class_weight is None:
        return (part,)
    if part.target is not aten.mul.Tensor or len(part.users) != 1:
        return None
    scale, node = part.args[1], part.args[0]
    if not isinstance(scale, fx.Node) or not isinstance(node, fx.Node):
        return None
    is_weight = scale.target in SHAPES and identity_of(scale.args[0]) == identity_of(class_weight)
    return (node, part) if is_weight and scale.meta["val"].dim() == 2 else None


def _summed(reader: fx.Node, class_weight: Any) -> tuple[fx.Node, ...] | None:
    """The nodes from the logarithms to the sum of each row, where `reader` begins one."""
    nodes = (reader,)
    if class_weight is not None:
        if _unscaled(reader, class_weight) is None:
            return None
        scale: Any = reader.args[1]
        nodes = (scale, reader, next(iter(reader.users)))
    last = nodes[-1]
    is_sum = last.target is aten.sum.dim_IntList and list(last.args[1:]) in ([[1]], [[1], False])
    return nodes if is_sum and not last.kwargs else None
