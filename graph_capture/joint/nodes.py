"""One fx node of a joint graph: its tensors and storages, arguments, randomness and place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from remat.graph_capture.distributed.dtensors import is_beside_local_part
from remat.graph_capture.joint.provenance import FUNCTION_KEY, MODULE_KEY, SOURCE_KEY, path_in_model
from remat.graph_capture.torch_private.core import OpOverload, pytree

aten = torch.ops.aten

TORCHS_NAMESPACES = frozenset(
    {
        "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_quantized",
        "aten", "c10d", "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn",
        "prim", "prims", "quantization", "quantized", "remat", "remat_ring", "rngprims", "sparse",
        "symm_mem",
    }
)  # fmt: skip
_PROBABILITY_ARGUMENTS = ("dropout_p", "p")
_CLONES_WHOLE_STORAGE = (
    aten.copy.default, aten.slice_scatter.default, aten.select_scatter.default,
    aten.diagonal_scatter.default, aten.as_strided_scatter.default,
)  # fmt: skip  # all of it, even for a small view


def tensors_of(node: fx.Node) -> list[Tensor | None]:
    """One entry a result; None where it is no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return [item if isinstance(item, Tensor) else None for item in value]  # pyright: ignore
    return [value if isinstance(value, Tensor) else None]


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # not data_ptr(): fake tensors have no memory


def erase_unread(*nodes: fx.Node) -> None:
    for node in nodes:
        if node.op == "call_function" and not node.users:
            read = node.all_input_nodes
            node.graph.erase_node(node)
            erase_unread(*read)


def result_bytes(node: fx.Node, tensor: Tensor) -> int:
    if node.target in _CLONES_WHOLE_STORAGE:  # a fake's storage size depends on torch's cache
        cloned = tensors_of(node.all_input_nodes[0])[0]
        if cloned is not None and 0 not in cloned.stride():
            return cloned.untyped_storage().nbytes()
    return tensor.untyped_storage().nbytes()


def fresh_storages(node: fx.Node) -> Iterator[int]:
    """Sizes of the storages of the node's results that are not those of its inputs."""
    seen = {storage_key(t) for a in node.all_input_nodes for t in tensors_of(a) if t is not None}
    for tensor in tensors_of(node):
        if tensor is not None and storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))
            yield result_bytes(node, tensor)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """False for an op that returns a list of views."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    is_aliased = len(returns) == 1 and returns[0].alias_info is not None
    return is_aliased and isinstance(node.meta.get("val"), Tensor)


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def argument(node: fx.Node, name: str, overload: Any = None) -> Any:
    """By schema name, defaults included; None where the op has no such argument."""
    schema = getattr(overload or node.target, "_schema", None)
    for i, parameter in enumerate(schema.arguments if schema else ()):
        if parameter.name == name:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
            # fx leaves out what was not passed, as attention's dropout_p = 0.0.
            return parameter.default_value if given is None else given
    return None


def draws_randomness(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in tags:
        return False
    # Attention ops are tagged as random even if their dropout probability is zero.
    return all(argument(node, name) != 0.0 for name in _PROBABILITY_ARGUMENTS)


def drawn_on(node: fx.Node) -> torch.device:
    return next(tensor for tensor in tensors_of(node) if tensor is not None).device


def mutates(node: fx.Node) -> bool:
    return writes(node.target)


def writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What a call writes to, as it is given: tensors, or lists of them."""
    for i, one in enumerate(func._schema.arguments if writes(func) else ()):
        if one.alias_info is not None and one.alias_info.is_write:
            yield args[i] if i < len(args) else kwargs.get(one.name)


TRIALS: dict[Any, str] = {}  # by custom op that was tried: why it must not run twice, or nothing


def is_custom(node: fx.Node) -> bool:
    # Other people's ops may draw or act without a tag.
    return isinstance(node.target, OpOverload) and node.target.namespace not in TORCHS_NAMESPACES


def is_alias_of_input(node: fx.Node) -> bool:
    """Whether the node stands for its first argument and need not run at all."""
    called = node.meta.get("custom", {}).get(FUNCTION_KEY, "")  # p = 0 returns its input in eager
    is_idle_dropout = node.target is aten.clone.default and "dropout" in called
    return node.target is aten.detach.default or is_idle_dropout


def target_name(node: fx.Node) -> str:
    target = node.target
    if not callable(target) or hasattr(target, "_schema"):
        return str(target)
    return getattr(target, "__name__", str(target))


def plain_name(target: Any) -> str:
    """Without the overload, and without the ``_`` of ops that work in place."""
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).rstrip("_")


def made_by_autograd(node: fx.Node) -> bool:
    is_marked = bool(node.meta.get("autograd_backward"))
    # torch 2.11 marks only phases.
    return is_marked or node.meta.get("partitioner_tag") == "is_backward"


class NodeOrigins:
    def __init__(self, graph: fx.Graph) -> None:
        self._by_sequence: dict[int, tuple[str, str]] = {}
        for node in graph.nodes:
            own, sequence = self._own(node), node.meta.get("seq_nr")
            if own and sequence is not None and not made_by_autograd(node):
                self._by_sequence.setdefault(sequence, own)  # numbered as their op of forward

    def of(self, node: fx.Node) -> tuple[str, str]:
        """``(module path, file:line)``, empty strings where unknown."""
        sequence = node.meta.get("seq_nr")
        if made_by_autograd(node) and sequence in self._by_sequence:
            return self._by_sequence[sequence]
        return self._own(node) or ("", "")

    @staticmethod
    def _own(node: fx.Node) -> tuple[str, str] | None:
        custom = node.meta.get("custom", {})
        if MODULE_KEY not in custom:
            return None
        return path_in_model(str(custom[MODULE_KEY])), str(custom[SOURCE_KEY])


def node_inputs(node: fx.Node) -> list[fx.Node]:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))


def copy_of(gm: fx.GraphModule, edit: Callable[[fx.Graph], Any] = lambda _: None) -> fx.GraphModule:
    """A copy with the same constants and `meta`, changed by `edit`. It takes its inputs flat."""
    graph = fx.Graph()  # a new graph has fx's plain calling convention, whatever that of `gm` is
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.find_nodes(op="output")[0].meta)  # `graph_copy` leaves it out
    edit(graph)  # before code is made of the graph, which takes long for thousands of nodes
    return fx.GraphModule(gm, graph)


def written_inputs(graph: fx.Graph, results: int) -> tuple[Any, ...]:
    """AOTAutograd's description by input, or None. `results`: how many outputs are forward's."""
    said = graph.output_node().meta["desc"][:results]
    written = {what.mutated_input for what in said if hasattr(what, "mutated_input")}
    given = [n.meta["desc"] for n in graph.find_nodes(op="placeholder") if not is_tangent(n)]
    own = [one for one in given if not is_beside_local_part(one)]  # a DTensor has a mesh, too
    return tuple(one if one in written else None for one in own)


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes in the order of its elements, shape (bytes,), uint8, copied only if needed.
    For comparisons, as a NaN equals a NaN of the same bits."""
    # One element is contiguous at any stride, 0 if expanded; `view` to another dtype needs 1.
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Zeros that forward-mode derivatives make are without bytes until they are copied.
    plain = plain.clone() if plain._is_zerotensor() else plain.contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


# What belongs to forward is seen from its results, and from the marks that it leaves as it ends.

MADE_IN_FORWARD = "remat_made_in_forward"  # marks what a forward has computed for backward alone


def mark_forward() -> None:
    """Called as forward ends. Outside of a trace it does nothing."""
    if (mode := get_proxy_mode()) is not None:
        for node in mode.tracer.graph.nodes:
            node.meta[MADE_IN_FORWARD] = True


def forward_nodes(nodes: Sequence[fx.Node], forward_results: Sequence[Any]) -> set[fx.Node]:
    """Ancestors of forward's outputs, and of ops without tangents that draw, act or are marked."""
    # A loss that makes its gradient in forward, by chunks, frees each chunk there, not in backward.
    from_tangents = {node for node in nodes if is_tangent(node)}
    for node in nodes:
        if node.op == "call_function" and not from_tangents.isdisjoint(node.all_input_nodes):
            from_tangents.add(node)
    calls = (n for n in nodes if n.op == "call_function" and n not in from_tangents)
    effects = [
        node
        for node in calls
        if MADE_IN_FORWARD in node.meta
        or draws_randomness(node)
        or all(t is None for t in tensors_of(node))
    ]
    found: set[fx.Node] = set()
    stack = [n for n in forward_results if isinstance(n, fx.Node)] + effects
    while stack:
        if (node := stack.pop()) not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
