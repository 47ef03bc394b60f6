"""Made data to run a traced node on its own: tensors laid out as its arguments.

What a kernel trusts is never made up. Fused attention on a CUDA device returns a seed and an offset
for its backward. They may be on the host where a trace has them on the device, and backward reads
them through a host pointer. cuDNN's batch norm reserves memory for its backward. Both are taken
from a run of the op that makes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from remat.graph_capture.devices.device_table import CPU, CUDA
from remat.graph_capture.joint.nodes import is_alias_of_input, is_getitem, target_name

aten = torch.ops.aten

_BLOCK = 4096
"""Elements of the random pattern that made data repeats."""
_LINE_BYTES = 64
"""Of a line of the caches. No kernel's speed hangs on more of an address than its place in one."""
_TRUSTED = ("aten._scaled_dot_product_", "aten._batch_norm_with_update", "remat.batch_norm")
"""Ops whose integer results a kernel trusts."""
_ASSERTIONS = ("aten._assert_async", "aten._functional_assert_async")
"""Ops that fail where a tensor says False, such as those that check the classes of a one-hot."""
_NORMS: dict[Any, int] = {
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
    aten._native_batch_norm_legit_functional.default: 1,
    aten._native_batch_norm_legit.no_stats: 1,
}
"""The place of the weight among the arguments of each norm."""
_INDEX_BOUND: dict[Any, Any] = {
    aten.embedding.default: lambda node: node.args[0].meta["val"].shape[0],
    aten.embedding_dense_backward.default: lambda node: node.args[2],
}


def price_key(node: fx.Node) -> str:
    """What determines a node's price: op, shapes, strides, alignment, dtypes and scalars."""

    def described(leaf: Any) -> str:
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
            return _described(value) if isinstance(value, Tensor) else repr(value)
        return repr(leaf)

    arguments = pytree.tree_map(described, (tuple(node.args), dict(node.kwargs)))
    return f"{target_name(node)}{arguments}"


def _described(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    # The steps of an unrolled loop read one tensor each at its own offset: one price does for all.
    offset = tensor.storage_offset() % max(1, _LINE_BYTES // tensor.element_size())
    return f"{dtype}{list(tensor.shape)}/{list(tensor.stride())}+{offset}"


def sample_arguments(node: fx.Node, constants: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like the node's, filled with made data.

    Parameters
    ----------
    constants : the module that holds the tensors of ``get_attr`` nodes.
    """
    bound = _index_bound(node)

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf.op == "get_attr":
            return getattr(constants, str(leaf.target))
        value = leaf.meta.get("val")
        if isinstance(value, Tensor) and _is_trusted(leaf, value):
            return _from_its_op(leaf, constants)
        if not isinstance(value, Tensor):
            return value
        tensor = _sample_tensor(value, bound).to(_dtype_of_kernel(leaf, value))
        return tensor.fill_(1) if target_name(node).startswith(_ASSERTIONS) else tensor

    return pytree.tree_map(made, (tuple(node.args), dict(node.kwargs)))


def _dtype_of_kernel(leaf: fx.Node, value: Tensor) -> torch.dtype:
    """The dtype that the kernel behind `leaf` gives.

    A CPU has mean and deviation of a norm as precise as its weight, where a trace has them in the
    16 bits of its input. Backward takes them in no other dtype.
    """
    while is_alias_of_input(leaf):
        leaf = leaf.all_input_nodes[0]
    source = leaf.args[0] if is_getitem(leaf) else None
    if not isinstance(source, fx.Node) or source.target not in _NORMS or leaf.args[1] not in (1, 2):
        return value.dtype
    weight = source.args[_NORMS[source.target]]
    if value.device.type != CPU or not isinstance(weight, fx.Node):
        return value.dtype
    return weight.meta["val"].dtype


def _is_trusted(leaf: fx.Node, value: Tensor) -> bool:
    """Whether a kernel trusts that `leaf` holds what another op wrote there."""
    if value.device.type != CUDA or not is_getitem(leaf) or value.is_floating_point():
        return False
    source = leaf.args[0]
    return isinstance(source, fx.Node) and target_name(source).startswith(_TRUSTED)


def _from_its_op(leaf: fx.Node, constants: Any) -> Any:
    source, index = leaf.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    assert callable(source.target)
    args, kwargs = sample_arguments(source, constants)
    return source.target(*args, **kwargs)[index]


def _index_bound(node: fx.Node) -> int:
    """A bound below which integers are valid indices into every tensor argument."""
    if node.target in _INDEX_BOUND:
        return int(_INDEX_BOUND[node.target](node))
    values = [leaf.meta.get("val") for leaf in node.all_input_nodes]
    sizes = [
        size
        for value in values
        if isinstance(value, Tensor) and value.is_floating_point()
        for size in value.shape
    ]
    return max(1, min(sizes, default=1))


def _sample_tensor(like: Tensor, bound: int) -> Tensor:
    n_elements = like.untyped_storage().nbytes() // like.element_size()
    flat = torch.empty(n_elements, dtype=like.dtype, device=like.device)
    _fill(flat, bound)
    return torch.as_strided(flat, like.shape, like.stride(), like.storage_offset())


def _fill(flat: Tensor, bound: int) -> None:
    """Fill with a random pattern, repeated.

    Every number is between 0.1 and 0.9: a probability, and no denormal, which would be slow.
    """
    if flat.dtype == torch.bool:
        block = torch.rand(_BLOCK, device=flat.device) < 0.9
    elif flat.is_floating_point() or flat.is_complex():
        block = torch.rand(_BLOCK, device=flat.device).mul_(0.8).add_(0.1).to(flat.dtype)
    else:
        block = torch.randint(bound, (_BLOCK,), device=flat.device).to(flat.dtype)
    whole = flat.numel() // _BLOCK * _BLOCK
    flat[:whole].view(-1, _BLOCK).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
