"""What each node of a backward graph runs after: what it reads, and writes in place between.

A backward graph has eager's ops, and eager adds some sums up in place. Two parts of such a graph
run in another order than it has, so a read and a write of the same storage must stay in theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from remat.graph_capture.distributed.collectives import is_wait
from remat.graph_capture.joint.nodes import is_getitem, storage_key, tensors_of
from remat.graph_capture.torch_private.core import OpOverloadPacket
from remat.rewriter.graphs.result_gradients import marks, release_gradients
from remat.rewriter.graphs.rng import draw_noting, drawn

Storage = tuple[fx.Node, int]
"""A storage, by the node that makes it, and the place among that node's results."""


class Dependencies:
    """The order that parts of a graph of eager's ops, as `emit` writes it, must keep.

    By node: `storages` of all its results, those that it reads or writes (`touched`, none of a
    view) or writes to, and the nodes that run `before` it. Marks of gradients are left out.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.storages: dict[fx.Node, frozenset[Storage]] = {}
        self.touched: dict[fx.Node, frozenset[Storage]] = {}
        self.before: dict[fx.Node, list[fx.Node]] = {}
        self.written: dict[fx.Node, frozenset[Storage]] = {}
        self._of_input: dict[int, Storage] = {}
        nodes = [node for node in graph.nodes if not is_mark(node)]
        for node in nodes:
            self._note_storages(node)
        self._note_order(nodes)

    def bytes_of(self, storage: Storage) -> int:
        node, place = storage
        tensors = tensors_of(node)
        tensor = tensors[place] if place < len(tensors) else None
        return 0 if tensor is None else tensor.untyped_storage().nbytes()

    def _note_storages(self, node: fx.Node) -> None:
        read = frozenset[Storage]().union(*(self.storages[a] for a in node.all_input_nodes))
        aliased, self.written[node] = self._by_schema(node)
        if node.op == "placeholder":
            own = self._of_placeholder(node)
        elif is_getitem(node):
            own = self._picked(node)
        elif is_wait(node) or aliased:
            own = aliased or read
        else:
            own = self._made(node)
        self.storages[node] = own
        makes = any(maker is node for maker, _ in own)
        is_look = node.op != "output" and not makes and not self.written[node]
        self.touched[node] = frozenset() if is_look else read

    def _of_placeholder(self, node: fx.Node) -> frozenset[Storage]:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return frozenset([(node, 0)])
        # Two inputs may be of one storage.
        return frozenset([self._of_input.setdefault(storage_key(value), (node, 0))])

    def _picked(self, node: fx.Node) -> frozenset[Storage]:
        source, place = node.args
        assert isinstance(source, fx.Node)
        one: Any = (source, place)
        return frozenset([one]) if one in self.storages[source] else self.storages[source]

    def _made(self, node: fx.Node) -> frozenset[Storage]:
        # A result may be an argument's storage although no schema says so.
        known = {
            storage_key(tensor): self.storages[argument]
            for argument in node.all_input_nodes
            for tensor in tensors_of(argument)
            if tensor is not None
        }
        found: set[Storage] = set()
        for place, tensor in enumerate(tensors_of(node)):
            key = None if tensor is None else storage_key(tensor)
            found |= known.get(key, {(node, place)}) if key is not None else {(node, place)}
        return frozenset(found)

    def _by_schema(self, node: fx.Node) -> tuple[frozenset[Storage], frozenset[Storage]]:
        aliased, written = set[Storage](), set[Storage]()
        if node.op != "call_function":
            return frozenset(), frozenset()
        if node.target is draw_noting:
            state = node.args[0]
            assert isinstance(state, fx.Node)
            # `draw_noting` writes a note into the state.
            written |= self.storages[state]
        target, args = drawn(node)
        schema = getattr(target, "_schema", None)
        returns_alias = schema is not None and any(r.alias_info for r in schema.returns)
        for i, parameter in enumerate(schema.arguments if schema else ()):
            given = args[i] if i < len(args) else node.kwargs.get(parameter.name)
            if parameter.alias_info is None:
                continue
            storages = self._of_argument(given)
            aliased |= storages if returns_alias else set()
            written |= storages if parameter.alias_info.is_write else set()
        return frozenset(aliased), frozenset(written)

    def _of_argument(self, given: Any) -> frozenset[Storage]:
        nodes = given if isinstance(given, (tuple, list)) else (given,)
        found = (self.storages[one] for one in nodes if isinstance(one, fx.Node))
        return frozenset[Storage]().union(*found)

    def _note_order(self, nodes: Sequence[fx.Node]) -> None:
        changing = frozenset[Storage]().union(*self.written.values())
        readers: dict[Storage, list[fx.Node]] = {storage: [] for storage in changing}
        writers: dict[Storage, list[fx.Node]] = {storage: [] for storage in changing}
        for node in nodes:
            found = dict.fromkeys(node.all_input_nodes)
            for storage in storages_in_order(self.touched[node] & changing):
                # A read and a write of one storage stay in their order, and so do two writes.
                found |= dict.fromkeys(writers[storage])
                if storage in self.written[node]:
                    found |= dict.fromkeys(readers[storage])
                    writers[storage].append(node)
                else:
                    readers[storage].append(node)
            self.before[node] = list(found)


def storages_in_order(storages: frozenset[Storage]) -> list[Storage]:
    # A frozenset has another order in each process.
    return sorted(storages, key=lambda one: (one[0].name, one[1]))


def is_heavy(node: fx.Node) -> bool:
    # Products and convolutions, in which models spend their time, have a formula of flops.
    packet = getattr(drawn(node)[0], "overloadpacket", None) if node.op == "call_function" else None
    return isinstance(packet, OpOverloadPacket) and packet in flop_registry


def is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is release_gradients


@dataclass(frozen=True)
class SplitBytes:
    """Of one microbatch in one block, parameters apart, without workspaces of ops.

    `inputs` is the most in I, with all that backward is given; `held` is held from I to W;
    `weights` is the most in W, with what is held.
    """

    inputs: int
    held: int
    weights: int


def most_live_bytes(part: fx.GraphModule, resident: Collection[str] = ()) -> int:
    """The most that a part has live, where each storage is freed behind the last op that reads it.

    `part` is I or W of `split_graph`, `resident` the names of inputs that cost nothing.
    """
    facts = Dependencies(part.graph)
    free = {s for n in part.graph.nodes if _is_free(n, resident) for s in facts.storages[n]}
    last = _last_uses(part, facts)
    given = {s for n in part.graph.find_nodes(op="placeholder") for s in facts.storages[n]} - free
    most = sum(map(facts.bytes_of, given))
    live = given & last.keys()
    for place, node in enumerate(part.graph.nodes):
        if node.op == "call_function" and not is_mark(node):
            live |= facts.storages[node] - free
            most = max(most, sum(map(facts.bytes_of, live)))
        live = {s for s in live if last.get(s, place) > place or node.op == "placeholder"}
    return most


def _is_free(node: fx.Node, resident: Collection[str]) -> bool:
    return node.op == "get_attr" or (node.op == "placeholder" and node.name in resident)


def _last_uses(part: fx.GraphModule, facts: Dependencies) -> dict[Storage, int]:
    last: dict[Storage, int] = {}
    releases_gradients = bool(marks(part.graph))
    for place, node in enumerate(part.graph.nodes):
        # Marks release gradients before the end, to which other results are needed.
        if node.op != "output" or not releases_gradients:
            last |= {s: place for one in node.all_input_nodes for s in facts.storages[one]}
    return last
