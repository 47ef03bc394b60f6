"""Inductor's joint graph as a `TrainingGraph` whose ops are kernels and calls.

Pointwise nodes take no storage of their own: they are inlined into the kernels that read them. Some
are values all the same: those that a call reads, that backward reads of forward, or that would make
their readers hold too much (`stored`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from remat.graph_capture.distributed.collectives import ALL_RANKS_RUN, is_collective, is_wait
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TANGENTS, Kind, Op, Phase, Resident, TrainingGraph, Value
from remat.graph_capture.joint.nodes import (
    aten,
    draws_randomness,
    is_custom,
    is_getitem,
    is_tangent,
    mutates,
    node_inputs,
    storage_key,
    target_name,
    tensors_of,
)
from remat.graph_capture.joint.output_aliasing import why_custom
from remat.rewriter.inductor.fused_nodes import (
    SEEDS,
    is_generated,
    is_inlined,
    is_reduction,
    module_and_line,
    refuse_symbols,
    shares_storage,
)

# A node that is inlined into several kernels makes each of them hold what it reads. Where that is
# more than the node itself, it is stored.


_MOST_READS = 4
"""Inductor stores a pointwise result that is read twice and reads more values than this."""
_MOST_LARGE_READS = 2
"""We also store one that is read twice and reads more values than this of at least its own size:
then one value is held instead of all. On a ResNet-18 that took the least peak from 101 to 85 MB."""
_MOST_HELD = 2
"""If more results than this wait for a later call, only to be read by one kernel, a part of that
kernel is computed and stored before the call. Gradients of a shared weight, which are added up, are
such results: on an LSTM that took the least peak in the graph from 35.7 to 11.1 MB."""


@dataclass
class _StoredNodes:
    """Says for each inlined node whether it is stored; asked in the order of the nodes.

    `readers` read a node through views. `reads` are the stored nodes and inputs that each inlined
    node reads, `held` those of them that nothing else reads.
    """

    nodes: Sequence[fx.Node]
    in_forward: set[fx.Node]
    readers: dict[fx.Node, list[fx.Node]]
    reads: dict[fx.Node, set[fx.Node]] = field(default_factory=dict[fx.Node, set[fx.Node]])
    held: dict[fx.Node, set[fx.Node]] = field(default_factory=dict[fx.Node, set[fx.Node]])

    def __post_init__(self) -> None:
        self.last_call = _last_calls(self.nodes)

    def is_stored(self, node: fx.Node) -> bool:
        readers = self.readers[node]
        is_result = any(reader.op == "output" for reader in readers)
        # Backward reads only what forward has saved, and a call reads memory.
        is_crossing = node in self.in_forward and any(r not in self.in_forward for r in readers)
        by_call = any(not is_inlined(reader) and not is_reduction(reader) for reader in readers)
        self.reads[node], self.held[node] = self._sources(node), self._held(node)
        stored = (
            is_result or is_crossing or by_call
            or (len(readers) > 1 and self._is_heavy(node)) or self._frees_more(node)
        )  # fmt: skip
        if stored:
            # Readers of a stored node read it, not its sources.
            del self.reads[node], self.held[node]
        return stored

    def _is_heavy(self, node: fx.Node) -> bool:
        reads = self.reads[node]
        return len(reads) > _MOST_READS or _count_large(reads, node) > _MOST_LARGE_READS

    def _frees_more(self, node: fx.Node) -> bool:
        # More than the node takes would be held until a later call has run.
        waits = any(self.last_call[r] > self.last_call[node] for r in self.readers[node])
        most = 1 if is_added_product(node) else _MOST_HELD
        return waits and _count_large(self.held[node], node) > most

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for source in map(_base, node_inputs(node)):
            found |= self.reads.get(source, {source})
        return found

    def _held(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for source in map(_base, node_inputs(node)):
            if source.op == "call_function" and set(self.readers[source]) == {node}:
                found |= self.held.get(source, {source})
        return found


def _last_calls(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each node, the place of the last call that must run before it, itself included."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        is_part = shares_storage(node) or is_getitem(node) or is_generated(node)
        is_call = node.op == "call_function" and not is_part
        last[node] = i if is_call else max((last[s] for s in node.all_input_nodes), default=-1)
    return last


def is_added_product(node: fx.Node) -> bool:
    """Whether Inductor makes one call of the node and a matrix product that it reads."""
    return node.target == aten.add.Tensor and any(
        source.target == aten.mm.default for source in node.all_input_nodes
    )


def _base(node: fx.Node) -> fx.Node:
    while shares_storage(node):
        node = node.all_input_nodes[0]
    return node


def _bytes_of(node: fx.Node) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors_of(node) if t is not None)


def _count_large(sources: set[fx.Node], node: fx.Node) -> int:
    made = _bytes_of(node)
    return sum(_bytes_of(source) >= made for source in sources)


@dataclass
class FusedJoint:
    """A training graph of kernels together with the fx nodes that its names stand for.

    `base_of_value` first returns a value; `values_read` must be live where a node is emitted.
    """

    module: fx.GraphModule
    n_outputs: int
    graph: TrainingGraph
    node_of_op: dict[str, fx.Node]
    base_of_value: dict[str, fx.Node]
    values_read: dict[fx.Node, tuple[str, ...]]


@dataclass
class _Builder:
    gm: fx.GraphModule
    n_outputs: int
    overwritten_names: Collection[str]
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    base: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    values_read: dict[fx.Node, tuple[str, ...]] = field(
        default_factory=dict[fx.Node, tuple[str, ...]]
    )
    node_of_op: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    ops: dict[Phase, list[Op]] = field(
        default_factory=lambda: {"forward": list[Op](), "backward": list[Op]()}
    )

    def __post_init__(self) -> None:
        self.nodes = list(self.gm.graph.nodes)
        results: Any = self.nodes[-1].args[0]
        self.forward_results = [n for n in results[: self.n_outputs] if isinstance(n, fx.Node)]
        self.gradients = [n for n in results[self.n_outputs :] if isinstance(n, fx.Node)]
        written = {n.args[0] for n in self.nodes if mutates(n)}
        self.overwritten = {n for n in self.nodes if n.name in self.overwritten_names} | written
        self.in_forward = self._forward_nodes()
        self.stored = _StoredNodes(self.nodes, self.in_forward, self._readers())

    def _forward_nodes(self) -> set[fx.Node]:
        """Ancestors of forward's results and of what draws or has effects there; their parts."""
        late = {node for node in self.nodes if is_tangent(node)}
        for node in self.nodes:
            if any(source in late for source in node.all_input_nodes):
                late.add(node)
        effects = [
            n for n in self.nodes
            if n.op == "call_function" and n not in late
            and (
                draws_randomness(n) or mutates(n) or n.target == SEEDS or is_collective(n)
                or is_custom(n) or not self.overwritten.isdisjoint(n.all_input_nodes)
            )
        ]  # fmt: skip
        found: set[fx.Node] = set()
        stack = [*self.forward_results, *effects]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += node.all_input_nodes
        for node in self.nodes:
            # Backward alone reads some, such as a dropout's mask.
            if is_getitem(node) and node.args[0] in found:
                found.add(node)
        return found

    def _readers(self) -> dict[fx.Node, list[fx.Node]]:
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.nodes):
            found[node] = [
                reader
                for user in node.users
                for reader in (found[user] if shares_storage(user) else [user])
            ]
        return found

    def build(self, name: str, resident: Resident, device: str) -> FusedJoint:
        self._add_inputs()
        for node in self.nodes:
            if node.op == "call_function":
                self._add(node)
        kept = self._names(n for n in self.forward_results if n not in self.overwritten)
        tangents = [v.name for v in self.values.values() if v.kind == "tangent"]
        ends = (*kept, *self._names(self.gradients), *tangents)
        graph = TrainingGraph(
            name=name,
            ops=(*self.ops["forward"], *self.ops["backward"]),
            values=tuple(self.values.values()),
            forward_outputs=tuple(dict.fromkeys(kept)),
            outputs=tuple(dict.fromkeys(ends)),
            resident=resident,
            device=device,
        )
        return FusedJoint(
            self.gm, self.n_outputs, graph, self.node_of_op, self.base, self.values_read
        )

    def _names(self, nodes: Iterable[fx.Node]) -> list[str]:
        names = [name for node in nodes for name in self.values_read[node]]
        return [name for name in names if self.values[name].producer]

    def _add_inputs(self) -> None:
        storages: dict[int, str] = {}
        tangents: list[str] = []
        for node in self.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            tensor = node.meta.get("val")
            self.values_read[node] = ()
            if not isinstance(tensor, Tensor):
                continue
            key = storage_key(tensor)
            if key not in storages:  # inputs of one storage are one value
                storages[key] = node.name
                is_late = is_tangent(node)
                kind: Kind = "tangent" if is_late else "input"
                self._register(node, node, tensor, "tangents" if is_late else "", kind)
                if is_late:
                    tangents.append(node.name)
            self.values_read[node] = (storages[key],)
        pin = "its results arrive from autograd"
        self.ops["backward"].append(
            Op("tangents", TANGENTS, "backward", (), tuple(tangents), no_recompute=pin)
        )

    def _register(
        self, node: fx.Node, base: fx.Node, tensor: Tensor, producer: str, kind: Kind
    ) -> None:
        self.base[node.name] = base
        self.values[node.name] = Value(
            name=node.name,
            size_bytes=tensor.untyped_storage().nbytes(),
            producer=producer,
            kind=kind,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(int(n) for n in tensor.shape),
        )

    def _read(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(v for a in node_inputs(node) for v in self.values_read.get(a, ()))
        )

    def _add(self, node: fx.Node) -> None:
        if is_getitem(node):
            self._add_part(node)
        elif is_wait(node):
            self._add_wait(node)
        elif shares_storage(node) or (is_inlined(node) and not self.stored.is_stored(node)):
            self.values_read[node] = self._read(node)
        else:
            self._add_op(node)

    def _add_part(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        self.values_read[node] = (
            # An element is a value of the op that made the tuple, or a view as its source is.
            (node.name,) if node.name in self.values else self.values_read[source]
        )

    def _add_wait(self, node: fx.Node) -> None:
        names = self._read(node)
        self.values_read[node] = names
        # What was waited for stands for a collective's result, and is what may be saved.
        if len(names) == 1 and self.values[names[0]].producer:
            self.base[names[0]] = node

    def _add_op(self, node: fx.Node) -> None:
        phase: Phase = "forward" if node in self.in_forward else "backward"
        outputs: list[str] = []
        kind: Kind = "activation" if phase == "forward" else "gradient"
        if isinstance(node.meta.get("val"), (tuple, list)):
            tensors = tensors_of(node)
            for user in node.users:
                tensor = tensors[user.args[1]] if is_getitem(user) else None  # pyright: ignore
                if tensor is not None and user.name not in self.values:
                    self._register(user, user, tensor, node.name, kind)
                    outputs.append(user.name)
        elif isinstance(node.meta.get("val"), Tensor) and not mutates(node):
            self._register(node, node, node.meta["val"], node.name, kind)
            outputs.append(node.name)
        inputs = self._read(node)
        # What an op with effects returns is the value that it writes to.
        self.values_read[node] = tuple(outputs) if outputs else self._written(node)
        self.node_of_op[node.name] = node
        module, source = module_and_line(node)
        self.ops[phase].append(
            Op(
                node.name, target_name(node), phase, inputs, tuple(outputs),
                no_recompute=self._why_no_recompute(node, phase), module=module, source=source,
            )
        )  # fmt: skip

    def _written(self, node: fx.Node) -> tuple[str, ...]:
        first = node.args[0] if node.args else None
        return self.values_read[first] if mutates(node) and isinstance(first, fx.Node) else ()

    def _why_no_recompute(self, node: fx.Node, phase: Phase) -> str:
        reads = {self.base.get(name) for name in self._read(node)}
        if mutates(node):
            return "it has effects"
        if is_collective(node):
            return ALL_RANKS_RUN
        if reads & self.overwritten and phase == "forward":
            return "it reads an input that the step overwrites"
        if reads & self.overwritten:
            raise CaptureError(
                f"backward reads {target_name(node)} of an input that forward overwrites "
                f"({module_and_line(node)[1]}). Give forward a copy: x.clone() before the change"
            )
        if node.target == SEEDS or draws_randomness(node):
            return "it draws random numbers"
        if all(t is None for t in tensors_of(node)):
            return "it has effects only"
        return why_custom(node)


def build_fused(
    gm: fx.GraphModule, n_outputs: int, name: str, resident: Resident, device: str,
    overwritten: Collection[str] = (),
) -> FusedJoint:  # fmt: skip
    """Analyse the joint graph to be partitioned, which reads copies of `overwritten` inputs."""
    for node in gm.graph.nodes:
        refuse_symbols(node)
    return _Builder(gm, n_outputs, overwritten).build(name, resident, device)
