"""The pointwise functions between the layers of an MLP that may run in pieces.

On a CPU, a kernel takes most elements of a tensor by vectors, and the rest, at the end of what each
thread is given, one by one. Some functions give other last bits that way: in float32, GELU and SiLU
do. What falls among the rest hangs on the number of elements, so a block may differ from the whole
in a few of them. Data that is made for a comparison might not show that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

VECTOR_ELEMENTS = 64
"""A multiple of what any CPU's vectorized loop takes at once: two vectors of 64 bytes."""
GRAIN_ELEMENTS = 1 << 15
"""From so many elements a thread on, torch gives each of its threads a part (`GRAIN_SIZE`)."""
COMPARED = 1 << 20
"""Elements that show whether a function has other bits one by one."""


@dataclass(frozen=True)
class Activation:
    """A pointwise function and its derivative, as eager calls them.

    Attributes
    ----------
    of_result : whether backward reads the function's result, and not what it was given.
    more : further arguments of backward. options : keyword arguments of both.
    """

    forward: Any
    backward: Any
    of_result: bool = False
    more: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, x: Tensor) -> Tensor:
        """Its value at x."""
        return self.forward(x, **self.options)

    def gradient(self, of_result: Tensor, read: Tensor) -> Tensor:
        """The gradient of what it was given, from that of its result."""
        return self.backward(of_result, read, *self.more, **self.options)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": Activation(
        aten.gelu.default, aten.gelu_backward.default, options={"approximate": "tanh"}
    ),
    "relu": Activation(aten.relu.default, aten.threshold_backward.default, True, (0,)),
    "silu": Activation(aten.silu.default, aten.silu_backward.default),
    "tanh": Activation(aten.tanh.default, aten.tanh_backward.default, True),
    "sigmoid": Activation(aten.sigmoid.default, aten.sigmoid_backward.default, True),
}


def activation_of(node: fx.Node) -> str | None:
    """The name of the activation that a node is; None for any other node."""
    for name, one in ACTIVATIONS.items():
        if node.target is one.forward and len(node.args) == 1 and _options(node) == one.options:
            return name
    return None


def is_gradient_of(name: str, node: fx.Node) -> bool:
    """Whether a node is the backward of the activation of that name."""
    one = ACTIVATIONS[name]
    return (
        node.target is one.backward
        and tuple(node.args[2:]) == one.more
        and _options(node) == one.options
    )


def _options(node: fx.Node) -> dict[str, Any]:
    """Keyword arguments, without those that say what is so by default."""
    return {key: value for key, value in node.kwargs.items() if value != "none"}


def has_equal_blocks(name: str, like: Tensor, sizes: list[int]) -> bool:
    """Whether no element hangs on how many there are: in tensors of these `sizes` as `like` is."""
    if like.device.type != "cpu" or _is_the_same_one_by_one(name, like.dtype):
        return True
    return all(_fills_vectors(size) for size in sizes)


@functools.cache
def _is_the_same_one_by_one(name: str, dtype: torch.dtype) -> bool:
    """Whether function and derivative have the same bits by vectors and one by one, on this CPU.

    A tensor with gaps is read one by one.
    """
    one, generator = ACTIVATIONS[name], torch.Generator().manual_seed(0)
    x, of_result = (torch.randn(COMPARED, 2, generator=generator).to(dtype)[:, 0] for _ in range(2))
    if dtype.itemsize == 2:
        # All of its values that are finite and more: NaNs are compared by none.
        every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        x[: len(every)] = torch.where(every.isfinite(), every, 0)
    close, of_close = x.contiguous(), of_result.contiguous()
    result = one(close)
    if not torch.equal(one(x), result):
        return False
    read = x if not one.of_result else torch.stack([result, result], 1)[:, 0]
    made = one.gradient(of_result, read)
    expected = one.gradient(of_close, result if one.of_result else close)
    return torch.equal(made, expected)


def _fills_vectors(size: int) -> bool:
    """Whether each thread is given a multiple of what is taken by vectors."""
    most = torch.get_num_threads()
    counts = [most] if size >= most * GRAIN_ELEMENTS else range(1, most + 1)
    return size % VECTOR_ELEMENTS == 0 and all(
        -(-size // count) % VECTOR_ELEMENTS == 0 for count in counts
    )
