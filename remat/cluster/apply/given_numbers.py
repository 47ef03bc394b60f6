"""Numbers of Python's that a model gives its blocks, such as a rate that a schedule moves.

A plan would hold them to the values of its first batch. So a block is traced with them as
attributes of its own, which each step reads anew (`float_inputs`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from remat.graph_capture.errors import FloatInputError
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.trace import Trace, trace
from remat.rewriter.user_module.own_forward import shell_running

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class GivenNumbers:
    """Names of attributes by the place of a number among the leaves of a block's call."""

    names: Mapping[int, str]

    def taken_out(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """A hook before forward: the module has the numbers, and the call none."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place, name in self.names.items():
            if place < len(leaves) and isinstance(leaves[place], float):
                module.__dict__[name], leaves[place] = leaves[place], None
        return pytree.tree_unflatten(leaves, spec)


def traced_with_numbers(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, Trace, GivenNumbers]:
    """What was traced, without the numbers that its steps read anew."""
    leaves = pytree.tree_leaves((args, kwargs))
    # Torch may run other ops for 0 than for all else.
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is float and leaf]
    if places:
        numbers = GivenNumbers({place: f"given_number_{place}" for place in places})
        one, names = _reading(block, numbers), tuple(numbers.names.values())
        # Where one cannot be read anew, a step with another is refused.
        with contextlib.suppress(FloatInputError):
            call = numbers.taken_out(one, args, kwargs)
            return one, trace(one, *call, float_inputs=names, split="none"), numbers
    return block, trace(block, args, kwargs, split="none"), GivenNumbers({})


def _reading(block: nn.Module, numbers: GivenNumbers) -> nn.Module:
    """A copy of a block, one deep, whose forward reads its numbers off the module."""
    kind, names = type(block), numbers.names

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place, name in names.items():
            if place < len(leaves) and leaves[place] is None:
                leaves[place] = getattr(self, name)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return kind.forward(self, *args, **kwargs)

    return shell_running(block, forward)
