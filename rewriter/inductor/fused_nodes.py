"""What Inductor makes of a node of its joint graph: a view, part of a kernel, a result, a call."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import (
    aten,
    draws_randomness,
    is_custom,
    is_getitem,
    mutates,
    node_inputs,
    storage_key,
    tensors_of,
)
from remat.graph_capture.torch_private.core import HigherOrderOperator, loses_gradients
from remat.graph_capture.torch_private.inductor import inductor_prims

_prims = torch.ops.prims

SEEDS = inductor_prims.seeds
SEEDED_DRAWS = frozenset({inductor_prims.random, inductor_prims.randint})
"""They draw from a seed that forward saves, so they repeat; draws from the stream run once."""

_INLINED = frozenset(
    {
        aten._adaptive_avg_pool2d.default, aten.arange.start_step, aten.cat.default,
        aten.clone.default, aten.constant_pad_nd.default, aten.copy.default,
        aten.embedding.default, aten.empty.memory_format, aten.flip.default, aten.full.default,
        aten.full_like.default, aten.gather.default, aten.index.Tensor, aten.repeat.default,
        aten.select_scatter.default, aten.slice_scatter.default, aten.where.self,
        _prims.convert_element_type.default, _prims.iota.default,
        inductor_prims.lookup_seed, *SEEDED_DRAWS,
    }
)  # fmt: skip

_REDUCTIONS = frozenset(
    {
        "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min",
        "prod", "std", "sum", "var", "var_mean",
    }
)  # fmt: skip


def shares_storage(node: fx.Node) -> bool:
    if node.op != "call_function" or mutates(node) or is_getitem(node):
        return False
    if getattr(node.target, "is_view", False):
        return True
    made = {storage_key(t) for t in tensors_of(node) if t is not None}
    given = {storage_key(t) for a in node.all_input_nodes for t in tensors_of(a) if t is not None}
    return bool(made) and made <= given


def is_inlined(node: fx.Node) -> bool:
    if node.op != "call_function" or draws_randomness(node) or mutates(node) or is_custom(node):
        return False
    return node.target in _INLINED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_reduction(node: fx.Node) -> bool:
    """Whether Inductor makes one kernel of the node and what is inlined into it."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", "")) in _REDUCTIONS


def is_generated(node: fx.Node) -> bool:
    return is_inlined(node) or is_reduction(node) or node.target == SEEDS


def is_call(node: fx.Node) -> bool:
    is_part = shares_storage(node) or is_getitem(node) or is_generated(node)
    return node.op == "call_function" and not is_part


def module_and_line(node: fx.Node) -> tuple[str, str]:
    """Module path and ``file:line`` behind a node; empty where dynamo has not noted them."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    module = paths[-1].removeprefix("L['self'].").removeprefix("L['fn'].") if paths else ""
    trace = str(node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "")
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return module, ""
    file, _, rest = lines[-1].removeprefix('File "').partition('", line ')
    return module, f"{file}:{rest.split(',')[0]}"


def refuse_symbols(node: fx.Node) -> None:
    for item in (node.meta.get("val"), *tensors_of(node)):
        sizes: list[Any] = list(item.shape) if isinstance(item, Tensor) else [item]
        for size in sizes:
            # A symbol whose number a guard has fixed is known.
            if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
                raise CaptureError(data_dependent_message(node.name, sizes))


def data_dependent_message(name: str, sizes: Sequence[Any]) -> str:
    return (
        "use a mask, or set torch._dynamo.config.capture_dynamic_output_shape_ops and "
        f"capture_scalar_outputs to False, which ends the graph there: {name} has a size that "
        f"depends on data, {list(sizes)}, and a plan needs known sizes"
    )


# Inlined into several kernels, a node makes each hold what it reads: if more, it is stored.

_MOST_READS = 4  # more, read twice, is stored by Inductor itself
_MOST_LARGE_READS = 2  # of its size or more: stored, which took a ResNet-18 from 101 to 85 MB
_MOST_HELD = 2
"""If more results than this wait for a later call, to be read by one kernel, a part of it is
computed and stored before: on an LSTM the least peak fell from 35.7 to 11.1 MB."""


@dataclass
class StoredNodes:
    """Says for each inlined node whether it is stored; asked in the order of the nodes."""

    nodes: Sequence[fx.Node]
    in_forward: set[fx.Node]
    readers: dict[fx.Node, list[fx.Node]]  # through views too

    def __post_init__(self) -> None:
        self.reads: dict[fx.Node, set[fx.Node]] = {}  # stored nodes and inputs, by inlined node
        self.held: dict[fx.Node, set[fx.Node]] = {}  # those of them that nothing else reads
        last: dict[fx.Node, int] = {}  # by node, the last call that must run before it, or itself
        for i, node in enumerate(self.nodes):
            sources = node.all_input_nodes
            last[node] = i if is_call(node) else max((last[s] for s in sources), default=-1)
        self.last_call = last

    def is_stored(self, node: fx.Node) -> bool:
        readers = self.readers[node]
        is_result = any(reader.op == "output" for reader in readers)
        # Backward reads only what forward has saved, and a call reads memory.
        is_crossing = node in self.in_forward and any(r not in self.in_forward for r in readers)
        by_call = any(not is_inlined(reader) and not is_reduction(reader) for reader in readers)
        found: set[fx.Node] = set()
        for source in map(viewed, node_inputs(node)):
            found |= self.reads.get(source, {source})
        self.reads[node], self.held[node] = found, self._held(node)
        is_heavy = len(found) > _MOST_READS or _count_large(found, node) > _MOST_LARGE_READS
        stored = (
            is_result or is_crossing or by_call
            or (len(readers) > 1 and is_heavy) or self._frees_more(node)
        )  # fmt: skip
        if stored:
            del self.reads[node], self.held[node]  # readers of a stored node read it alone
        return stored

    def _frees_more(self, node: fx.Node) -> bool:
        # More than the node takes would be held until a later call has run.
        waits = any(self.last_call[r] > self.last_call[node] for r in self.readers[node])
        most = 1 if is_added_product(node) else _MOST_HELD
        return waits and _count_large(self.held[node], node) > most

    def _held(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for source in map(viewed, node_inputs(node)):
            if source.op == "call_function" and set(self.readers[source]) == {node}:
                found |= self.held.get(source, {source})
        return found


def is_added_product(node: fx.Node) -> bool:
    """Whether Inductor makes one call of the node and a matrix product that it reads."""
    products = [source for source in node.all_input_nodes if source.target == aten.mm.default]
    return node.target == aten.add.Tensor and bool(products)


def viewed(node: fx.Node) -> fx.Node:
    while shares_storage(node):
        node = node.all_input_nodes[0]
    return node


def _bytes_of(node: fx.Node) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors_of(node) if t is not None)


def _count_large(sources: set[fx.Node], node: fx.Node) -> int:
    made = _bytes_of(node)
    return sum(_bytes_of(source) >= made for source in sources)


# Most graphs that a node runs (branches, loops) are one call. Three kinds get wrong gradients from
# torch itself, and are refused: branches that draw, nested compile regions (torch 2.13), and an
# `autograd.Function` that writes to what it returns (torch 2.11).


def subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs that `node` is given, without those inside of these."""
    owner = node.graph.owning_module
    for source in node.all_input_nodes:
        if source.op == "get_attr" and owner is not None:
            module: object = attrgetter(str(source.target))(owner)
            if isinstance(module, fx.GraphModule):
                yield module.graph


def refuse_regions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.invoke_subgraph:  # regions are partitioned first
            raise CaptureError(
                "leave out torch.compiler.nested_compile_region under this backend: "
                f"{_where(node)} calls one, for which torch makes wrong gradients"
            )


def refuse_lost_gradients(graph: fx.Graph) -> None:
    """Raise `CaptureError` for a function whose backward torch has left out."""
    if not loses_gradients():
        return
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.autograd_function_apply and _writes_result(node):
            raise CaptureError(
                "return a new tensor, y = x.clone().mul(2) and not .mul_(2), or use torch 2.12 or "
                f"later: {_where(node)} calls an autograd.Function whose forward writes in place "
                "to what it returns, and torch 2.11 leaves out its gradient.\n"
                "For collectives use torch.distributed._functional_collectives.\n"
                "Or keep the function out of the graph with torch.compiler.disable"
            )
        if isinstance(node.target, HigherOrderOperator):
            for inner in subgraphs(node):
                refuse_lost_gradients(inner)


def _writes_result(node: fx.Node) -> bool:
    body = next(subgraphs(node))
    (returned,) = body.find_nodes(op="output")
    results: Any = returned.args[0]
    values = [getattr(one, "meta", {}).get("example_value") for one in results[0]]
    # Of two results that are one tensor, as after a write in place, torch 2.11 differentiates none.
    made = Counter(id(value) for value in values if value is not None)
    used = [user.args[1] for user in node.users if user.target is operator.getitem]
    return any(made[id(value)] > 1 for i, value in enumerate(values) if i in used)


def refuse_drawing(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and any(
            map(_draws_inside, subgraphs(node))
        ):
            raise CaptureError(
                f"draw before it, and pass that in: a graph that {node.target.name()} runs draws "
                f"random numbers ({_where(node)}), and its backward draws others, in eager too"
            )


def _where(node: fx.Node) -> str:
    module, source = module_and_line(node)
    return ", ".join(filter(None, (module, source))) or "an unknown line"


def _draws_inside(graph: fx.Graph) -> bool:
    seeded = {*SEEDED_DRAWS, SEEDS}
    return any(
        draws_randomness(n) or n.target in seeded or any(map(_draws_inside, subgraphs(n)))
        for n in graph.nodes
    )


# Inductor's C++ writes bool an order slower than uint8, lane by lane, so masks that backward reads
# become bytes by way of a float: 0.3 ms in place of 6.4 for 524,288 elements on AVX-512. The joint
# graph is changed before it is planned, so that a plan keeps the byte.

LEAST_MASK_ELEMENTS = 1024  # smaller masks stay as they are: their time does not matter
CONVERT = torch.ops.prims.convert_element_type.default
_IS_SET = torch.ops.aten.ne.Scalar


def keep_masks_as_bytes(gm: fx.GraphModule, n_outputs: int) -> int:
    """Keep, in place, each mask that backward reads of forward as a byte; returns how many."""
    forward = makers(gm.graph.find_nodes(op="output")[0].args[0][:n_outputs])  # pyright: ignore
    made = [node for node in gm.graph.nodes if node in forward and _is_mask(node)]
    masks = [node for node in made if _is_read_beyond(node, forward)]
    for node in masks:
        _through_bytes(node)
    gm.recompile()
    return len(masks)


def makers(results: Iterable[Any]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [result for result in results if isinstance(result, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _is_mask(node: fx.Node) -> bool:
    tensor = node.meta.get("val")
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype == torch.bool
        and tensor.device.type == "cpu"
        and tensor.numel() >= LEAST_MASK_ELEMENTS
        and is_inlined(node)
        and not shares_storage(node)
    )


def _is_read_beyond(node: fx.Node, forward: set[fx.Node]) -> bool:
    return any(
        _is_read_beyond(user, forward) if shares_storage(user) else user not in forward
        for user in node.users
    )


def _through_bytes(node: fx.Node) -> None:
    users = [user for user in node.users if user.op != "output"]
    graph = node.graph
    with graph.inserting_after(node):
        number = _made(graph, node, CONVERT, (node, torch.float32))  # bool to byte is lane by lane
    with graph.inserting_after(number):
        byte = _made(graph, node, CONVERT, (number, torch.uint8))
    for user in users:
        with graph.inserting_before(user):
            read = _made(graph, node, CONVERT, (byte, torch.float32))  # so the byte is kept
            user.replace_input_with(node, _made(graph, node, _IS_SET, (read, 0)))


def _made(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    made = graph.call_function(target, args)
    made.meta = {**node.meta, "val": target(args[0].meta["val"], args[1])}
    made.meta.pop("tensor_meta", None)
    return made
