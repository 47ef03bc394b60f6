"""What running an op takes of any device: arithmetic and traffic, from shapes alone."""

from __future__ import annotations

from typing import Any, cast

from torch import fx
from torch.utils import flop_counter

from remat.graph_capture.node_facts import target_name, tensors_of

_COUNTS = cast("Any", flop_counter)
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the node's arguments and results; of an expanded tensor, those it has."""
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of one run; 0 where torch does not count them."""
    args: list[Any] = [_value(arg) for arg in node.args]
    name = target_name(node)
    if name == ATTENTION:
        return _COUNTS.sdpa_flop_count(*(t.shape for t in args[:3]))
    if name == ATTENTION_BACKWARD:
        return _COUNTS.sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    formula = _COUNTS.flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    kwargs = {key: _value(arg) for key, arg in node.kwargs.items()}
    return int(formula(*args, **kwargs, out_val=_value(node)))


def _value(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [_value(item) for item in cast("list[Any]", argument)]
    return argument
