"""An MLP in chunks, so that its whole hidden activation is never live.

Outputs are cut, sums never, so each number is made by eager's kernel over eager's sum. The weights'
gradients are cut along the hidden dimension. Backward makes the hidden activation and its gradient
once in each orientation: three products more than where they are kept, with a gate five. An MLP is
``down(f(gate(x)))``, or ``down(f(gate(x)) * up(x))`` with a gate (N. Shazeer, 2020,
https://arxiv.org/abs/2002.05202). Blocks of rows of MLPs: Blockwise Parallel Transformer (H. Liu
and P. Abbeel, 2023, https://arxiv.org/abs/2305.19370), which sums the weights' gradients over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.chunking.blocks import blocks
from remat.graph_capture.chunking.head_ops import linear
from remat.graph_capture.chunking.mlp import ACTIVATIONS

COLUMNS_MULTIPLE = 64  # blocks of hidden columns are such, so each begins at a line of the caches
_ALL = slice(None)

_LAYERS = "Tensor weight, Tensor? bias, Tensor? up_weight, Tensor? up_bias, Tensor down_weight"
_MLP = f"Tensor x, {_LAYERS}"
_BACK = f"Tensor gradient, {_MLP}, str activation, int chunks"
_library = torch.library.Library("remat", "FRAGMENT")
_library.define(f"mlp({_MLP}, Tensor? down_bias, str activation, int chunks) -> Tensor")
_library.define(f"mlp_input({_BACK}) -> Tensor")
_library.define(f"mlp_gated_input({_BACK}) -> (Tensor of_gate, Tensor of_up)")
_library.define(
    f"mlp_weights({_BACK.removesuffix(', int chunks')}, bool[] wanted, int chunks) -> (Tensor "
    "weight, Tensor bias, Tensor up_weight, Tensor up_bias, Tensor down_weight)"
)
_Taken = Callable[[Tensor], Any]  # takes a block of the gradient, which lives no longer


@dataclass(frozen=True)
class _SplitMlp:
    x: Tensor  # (n, d)
    weight: Tensor  # (h, d)
    bias: Tensor | None  # (h,)
    up_weight: Tensor | None  # (h, d); None without a gate
    up_bias: Tensor | None
    down_weight: Tensor  # (d_out, h)
    activation: str  # a name of `ACTIVATIONS`
    chunks: int

    def rows(self) -> list[slice]:
        return [slice(a, b) for a, b in blocks(self.x.shape[0], self.chunks)]

    def columns(self) -> list[slice]:
        return [slice(a, b) for a, b in blocks(self.weight.shape[0], self.chunks, COLUMNS_MULTIPLE)]

    def inner(self, rows: slice) -> Tensor:
        result = ACTIVATIONS[self.activation](self._gate(rows, _ALL))
        return result if self.up_weight is None else result * self._up(rows, _ALL)

    def _gate(self, rows: slice, columns: slice) -> Tensor:
        return _part_of_layer(self.x[rows], self.weight, self.bias, columns)

    def _up(self, rows: slice, columns: slice) -> Tensor:
        assert self.up_weight is not None
        return _part_of_layer(self.x[rows], self.up_weight, self.up_bias, columns)

    def backward(
        self, gradient: Tensor, rows: slice, columns: slice,
        use_gate: _Taken, use_up: _Taken, use_inner: _Taken | None = None,
    ) -> None:  # fmt: skip
        """Hand on a block of the gradients of what gate, up, and (`use_inner`) down are given."""
        function = ACTIVATIONS[self.activation]
        read = self._gate(rows, columns)
        if self.up_weight is None:
            if function.of_result:
                read = function(read)
            if use_inner:
                use_inner(read if function.of_result else function(read))
            made = torch.mm(gradient[rows], self.down_weight[:, columns])
            use_gate(function.gradient(made, read))
            return
        result = function(read)
        if function.of_result:
            read = result
        up = self._up(rows, columns) if use_inner else None  # made once `result` is gone, else
        if use_inner and up is not None:
            use_inner(result * up)
        made = torch.mm(gradient[rows], self.down_weight[:, columns])
        use_up(made * result)
        del result  # `_BLOCKS_GATED` of regions.py counts what is live here
        made = made * (self._up(rows, columns) if up is None else up)
        del up
        use_gate(function.gradient(made, read))


def _part_of_layer(x: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    return linear(x, weight[columns], None if bias is None else bias[columns])


@torch.library.impl(_library, "mlp", "CompositeExplicitAutograd")
def _mlp(*given: Any) -> Tensor:
    down_bias, one = given[6], _SplitMlp(*given[:6], *given[7:])
    # Blocks are written into it, so that none of the output is there beside it.
    made = one.x.new_empty(one.x.shape[0], one.down_weight.shape[0])
    for rows in one.rows():
        linear(one.inner(rows), one.down_weight, down_bias, out=made[rows])
    return made


@torch.library.impl(_library, "mlp_input", "CompositeExplicitAutograd")
def _mlp_input(gradient: Tensor, *given: Any) -> Tensor:
    return _of_input(gradient, _SplitMlp(*given))[0]


@torch.library.impl(_library, "mlp_gated_input", "CompositeExplicitAutograd")
def _mlp_gated_input(gradient: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The two terms of x's gradient, through the gate and through up, which the step adds up."""
    return _of_input(gradient, _SplitMlp(*given))


def _of_input(gradient: Tensor, one: _SplitMlp) -> tuple[Tensor, Tensor]:
    of_gate = torch.empty_like(one.x)
    # Without a gate nobody writes to it.
    of_up = of_gate if one.up_weight is None else torch.empty_like(one.x)
    for rows in one.rows():

        def use_gate(made: Tensor, rows: slice = rows) -> None:
            torch.mm(made, one.weight, out=of_gate[rows])

        def use_up(made: Tensor, rows: slice = rows) -> None:
            assert one.up_weight is not None
            torch.mm(made, one.up_weight, out=of_up[rows])

        one.backward(gradient, rows, _ALL, use_gate, use_up)
    return of_gate, of_up


@torch.library.impl(_library, "mlp_weights", "CompositeExplicitAutograd")
def _mlp_weights(gradient: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The gradients of weights and biases; those that are not wanted have no elements."""
    wanted, one = given[7], _SplitMlp(*given[:7], *given[8:])
    made = _Gradients(one, gradient, wanted)
    for columns in one.columns():
        made.add(columns)
    return made.weight, made.bias, made.up_weight, made.up_bias, made.down_weight


class _Gradients:
    def __init__(self, one: _SplitMlp, gradient: Tensor, wanted: list[bool]) -> None:
        self.one, self.of_output = one, gradient
        of_weight, of_bias = one.weight.shape, (1, one.weight.shape[0])
        shapes = of_weight, of_bias, of_weight, of_bias, one.down_weight.shape
        self.weight, self.bias, self.up_weight, self.up_bias, self.down_weight = (
            one.weight.new_empty(shape if is_wanted else (0,))
            for shape, is_wanted in zip(shapes, wanted, strict=True)
        )

    def add(self, columns: slice) -> None:
        def use_gate(made: Tensor) -> None:
            self._add(made, columns, self.weight, self.bias)

        def use_up(made: Tensor) -> None:
            self._add(made, columns, self.up_weight, self.up_bias)

        def use_inner(made: Tensor) -> None:
            torch.mm(self.of_output.t(), made, out=self.down_weight[:, columns])

        inner = use_inner if self.down_weight.numel() else None
        self.one.backward(self.of_output, _ALL, columns, use_gate, use_up, inner)

    def _add(self, made: Tensor, columns: slice, weight: Tensor, bias: Tensor) -> None:
        if weight.numel():
            torch.mm(made.t(), self.one.x, out=weight[columns])
        if bias.numel():
            bias[:, columns] = made.sum([0], True)  # as autograd sums: shape (1, h)


MLP = torch.ops.remat.mlp.default
MLP_INPUT = torch.ops.remat.mlp_input.default
MLP_GATED_INPUT = torch.ops.remat.mlp_gated_input.default
MLP_WEIGHTS = torch.ops.remat.mlp_weights.default
