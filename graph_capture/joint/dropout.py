"""Dropout as eager computes it on a CPU, to the last bit and in about its time.

A trace replaces dropout by `aten.native_dropout`, which scales by 1 / (1 - p) rounded
from double precision. Eager divides in the tensor's own precision, which for some p
(0.04, 0.15, 0.45, ...) is another float32, and for most p another bfloat16 in backward.
The nodes are changed here to ops that scale as eager does.

The mask stays one byte an element, where eager keeps a whole float. So even the plan that keeps
everything needs less than the unmodified step, whose prediction takes eager's size
(`derived/eager.py`).

The mask is read as uint8, since kernels for a CPU convert bool much slower. For 512 x 768 elements
on an AVX-512 machine, the product with bool takes 0.44 ms, and making a float of the bool first
0.07. So `aten.native_dropout_backward` took 0.56 ms, the op here takes 0.22, and eager's product
0.17.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import make_contiguous_strides_for

aten = torch.ops.aten


_library = torch.library.Library("remat", "DEF")
_library.define(
    "dropout(Tensor x, float p, float scale, *, Generator? generator=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define("dropout_backward(Tensor gradient, Tensor mask, float scale) -> Tensor")


@torch.library.impl(_library, "dropout", "CompositeExplicitAutograd")
def dropout_as_eager(
    x: Tensor, p: float, scale: float, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """``(result, mask)`` of dropout on a CPU; draws what eager draws."""
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return _dropped(x, mask, scale), mask


@torch.library.impl(_library, "dropout_backward", "CompositeExplicitAutograd")
def dropout_backward_as_eager(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The gradient of dropout's input."""
    return _dropped(gradient, mask, scale)


def _dropped(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`x` times eager's noise, in the storage of the noise if that is laid out as the product."""
    noise = mask.view(torch.uint8).to(x.dtype).mul_(scale)
    return noise.mul_(x) if _has_layout_of_product(noise, x) else x.mul(noise)


def _has_layout_of_product(noise: Tensor, x: Tensor) -> bool:
    """Whether `noise` is laid out as `x * noise` would be.

    A product's strides along dimensions of one element are not always those of its factors.
    """
    if noise.stride() != x.stride():
        return False
    return 1 not in x.shape or x.stride() == make_contiguous_strides_for(x.shape)


DROPOUT = torch.ops.remat.dropout.default
DROPOUT_BACKWARD = torch.ops.remat.dropout_backward.default


def scale_of_eager(p: float, dtype: torch.dtype) -> float:
    """What eager multiplies a kept element by."""
    return torch.ones(1, dtype=dtype).div_(1 - p).item()


def make_dropout_exact(gm: fx.GraphModule) -> None:
    """Change the dropout nodes of a joint graph on a CPU, and their backward, to eager's."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p = node.args[0], node.args[1]
        value = x.meta["val"] if isinstance(x, fx.Node) else None
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            continue
        if not isinstance(p, float) or not 0 < p < 1:
            continue
        scale = scale_of_eager(p, value.dtype)
        node.target = DROPOUT
        node.args = (x, p, scale)
        _change_backward(node, scale)


def _change_backward(dropout: fx.Node, scale: float) -> None:
    """Change every backward node that reads the mask of `dropout` to one that scales by `scale`."""
    masks: list[fx.Node] = [user for user in dropout.users if user.args[1] == 1]
    while masks:
        for user in list(masks.pop().users):
            if user.target is aten.native_dropout_backward.default:
                args: tuple[Any, ...] = (*user.args[:2], scale)
                user.target, user.args = DROPOUT_BACKWARD, args
            elif user.target is aten.detach.default:
                masks.append(user)
