"""Turns a graph of symbolic shapes into one for the shape at hand.

Where a size has changed from one call to the next, dynamo makes it a symbol, so that one graph
serves all sizes. But a plan is for one shape. Asking a symbol for its value notes a guard: dynamo
then compiles again for each other shape, and each has a plan of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensor

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import storage_key

EXAMPLE = "example_value"
"""Key of a node's `meta` under which dynamo keeps what it traced the node with."""


def of_one_shape(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Inputs with numbers in place of symbols; the graph reads these, in place.

    Raises
    ------
    CaptureError : the user has asked for symbols, or a size depends on data.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    traced = [node.meta.get(EXAMPLE) for node in placeholders]
    if not any(map(_is_symbolic, traced)):
        return list(example_inputs)
    _refuse_marked(placeholders)
    _refuse_asked_for(traced)
    for node, value in zip(placeholders, traced, strict=True):
        if isinstance(value, torch.SymInt):
            _read_number(node, int(value))
    gm.recompile()
    bases: dict[int, Tensor] = {}
    pairs = zip(example_inputs, traced, strict=True)
    return [_fixed(value, bases) if _is_fake(value) else given for given, value in pairs]


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor) and _is_symbolic(value)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(n, torch.SymInt) for n in _geometry(value))
    return isinstance(value, torch.SymInt)


def _geometry(tensor: Tensor) -> list[Any]:
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


def _refuse_marked(placeholders: Sequence[fx.Node]) -> None:
    """Raise where `mark_dynamic` forbids to fix a size, of which a plan is made."""
    for node in placeholders:
        given = getattr(node.meta.get("grapharg"), "example", None)
        marked = sorted(getattr(given, "_dynamo_dynamic_indices", ()))
        if marked and isinstance(given, Tensor):
            raise CaptureError(
                f"dimension {marked[0]} of an input of shape {list(given.shape)} is marked by "
                "torch._dynamo.mark_dynamic, and a plan is for one shape: leave the mark out, or "
                "use torch._dynamo.maybe_mark_dynamic. Each shape that comes is planned for"
            )


def _refuse_asked_for(traced: Sequence[Any]) -> None:
    """Raise where the user asked for symbols, or one has no value yet.

    Who writes `dynamic=True` wants one graph for all shapes, and would get one for each.
    """
    shapes = [list(t.shape) for t in traced if _is_fake(t)]
    numbers = [n for t in traced if isinstance(t, Tensor) for n in _geometry(t)]
    symbols = [n for n in [*numbers, *traced] if isinstance(n, torch.SymInt)]
    if dynamo_config.assume_static_by_default and all(n.node.has_hint() for n in symbols):
        return
    raise CaptureError(
        f"a size of the inputs is symbolic, {(shapes or [symbols])[0]}, and a plan is for one "
        "shape: leave out dynamic=True, or give dynamic=False, in torch.compile(model, "
        'backend="remat"), which then plans for each shape that comes'
    )


def _read_number(node: fx.Node, value: int) -> None:
    """Put `value` where `node` is read."""
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _fixed(fake: FakeTensor, bases: dict[int, Tensor]) -> Tensor:
    """`fake` with plain numbers; taking them from symbols notes the guards."""
    shape, stride = [int(n) for n in fake.shape], [int(n) for n in fake.stride()]
    offset, key = int(fake.storage_offset()), storage_key(fake)
    with fake.fake_mode, torch.no_grad():
        if key not in bases:
            size_bytes = int(fake.untyped_storage().nbytes())
            bases[key] = torch.empty(size_bytes, dtype=torch.uint8, device=fake.device)
        made = torch.empty(0, dtype=fake.dtype, device=fake.device)
        made.set_(bases[key].untyped_storage(), offset, shape, stride)  # pyright: ignore
    return made.requires_grad_(fake.requires_grad)
