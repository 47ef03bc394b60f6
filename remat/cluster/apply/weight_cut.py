"""Cuts a backward graph into the gradients of inputs (I) and those of weights (W).

After zero bubble pipelines (Qi et al. 2023, https://arxiv.org/abs/2401.10241). Light ops run in I
if their results are smaller than what they read. W releases each gradient once it is final.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from ortools.graph.python import max_flow
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from remat.graph_capture.distributed.collectives import is_wait
from remat.graph_capture.joint.nodes import is_getitem, is_tangent, storage_key, tensors_of
from remat.graph_capture.torch_private.core import OpOverloadPacket
from remat.rewriter.graphs.backward_parts import SplitBytes, SplitGraphs
from remat.rewriter.graphs.codegen import marks, release_gradients
from remat.rewriter.graphs.emitter import placeholder_like
from remat.rewriter.graphs.rng import draw_noting, drawn

# Eager adds some sums up in place, and two parts run in another order than the graph: a read and a
# write of the same storage must stay in theirs.

_Storage = tuple[fx.Node, int]  # its maker, and the place among the maker's results


class Dependencies:
    """The order that parts of a graph of eager's ops, as `emit` writes it, must keep.

    By node: `storages` of results, those `touched` or written, and nodes to run `before` it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.storages: dict[fx.Node, frozenset[_Storage]] = {}
        self.touched: dict[fx.Node, frozenset[_Storage]] = {}
        self.before: dict[fx.Node, list[fx.Node]] = {}
        self.written: dict[fx.Node, frozenset[_Storage]] = {}
        self._of_input: dict[int, _Storage] = {}
        nodes = [node for node in graph.nodes if not is_mark(node)]
        for node in nodes:
            self._note_storages(node)
        self._note_order(nodes)

    def bytes_of(self, storage: _Storage) -> int:
        node, place = storage
        tensors = tensors_of(node)
        tensor = tensors[place] if place < len(tensors) else None
        return 0 if tensor is None else tensor.untyped_storage().nbytes()

    def _note_storages(self, node: fx.Node) -> None:
        read = frozenset[_Storage]().union(*(self.storages[a] for a in node.all_input_nodes))
        aliased, self.written[node] = self._by_schema(node)
        if node.op == "placeholder":
            value = node.meta.get("val")
            key = storage_key(value) if isinstance(value, Tensor) else None
            # Two inputs may be of one storage.
            first = (node, 0) if key is None else self._of_input.setdefault(key, (node, 0))
            own = frozenset([first])
        elif is_getitem(node):
            source, place = node.args
            assert isinstance(source, fx.Node)
            one: Any = (source, place)
            own = frozenset([one]) if one in self.storages[source] else self.storages[source]
        elif is_wait(node) or aliased:
            own = aliased or read
        else:
            own = self._made(node)
        self.storages[node] = own
        makes = any(maker is node for maker, _ in own)
        is_look = node.op != "output" and not makes and not self.written[node]
        self.touched[node] = frozenset() if is_look else read

    def _made(self, node: fx.Node) -> frozenset[_Storage]:
        # A result may be an argument's storage although no schema says so.
        given = [(one, t) for one in node.all_input_nodes for t in tensors_of(one)]
        known = {storage_key(t): self.storages[one] for one, t in given if t is not None}
        found: set[_Storage] = set()
        for place, tensor in enumerate(tensors_of(node)):
            key = None if tensor is None else storage_key(tensor)
            found |= known.get(key, {(node, place)}) if key is not None else {(node, place)}
        return frozenset(found)

    def _by_schema(self, node: fx.Node) -> tuple[frozenset[_Storage], frozenset[_Storage]]:
        aliased, written = set[_Storage](), set[_Storage]()
        if node.op != "call_function":
            return frozenset(), frozenset()
        if node.target is draw_noting:
            state = node.args[0]
            assert isinstance(state, fx.Node)
            written |= self.storages[state]  # `draw_noting` writes a note into the state
        target, args = drawn(node)
        schema = getattr(target, "_schema", None)
        returns_alias = schema is not None and any(r.alias_info for r in schema.returns)
        for i, parameter in enumerate(schema.arguments if schema else ()):
            given = args[i] if i < len(args) else node.kwargs.get(parameter.name)
            if parameter.alias_info is None:
                continue
            nodes = given if isinstance(given, (tuple, list)) else (given,)
            found = (self.storages[one] for one in nodes if isinstance(one, fx.Node))
            storages = frozenset[_Storage]().union(*found)
            aliased |= storages if returns_alias else set()
            written |= storages if parameter.alias_info.is_write else set()
        return frozenset(aliased), frozenset(written)

    def _note_order(self, nodes: Sequence[fx.Node]) -> None:
        changing = frozenset[_Storage]().union(*self.written.values())
        readers: dict[_Storage, list[fx.Node]] = {storage: [] for storage in changing}
        writers: dict[_Storage, list[fx.Node]] = {storage: [] for storage in changing}
        for node in nodes:
            found = dict.fromkeys(node.all_input_nodes)
            for storage in _storages_in_order(self.touched[node] & changing):
                found |= dict.fromkeys(writers[storage])  # reads and writes stay in order
                if storage in self.written[node]:
                    found |= dict.fromkeys(readers[storage])
                    writers[storage].append(node)
                else:
                    readers[storage].append(node)
            self.before[node] = list(found)


def _storages_in_order(storages: frozenset[_Storage]) -> list[_Storage]:
    return sorted(storages, key=lambda one: (one[0].name, one[1]))  # a frozenset has no fixed order


def is_heavy(node: fx.Node) -> bool:
    # Products and convolutions, in which models spend their time, have a formula of flops.
    packet = getattr(drawn(node)[0], "overloadpacket", None) if node.op == "call_function" else None
    return isinstance(packet, OpOverloadPacket) and packet in flop_registry


def is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is release_gradients


def most_live_bytes(part: fx.GraphModule, resident: Collection[str] = ()) -> int:
    """The most that a part has live, each storage freed after its last reader; not `resident`."""
    facts, inputs = Dependencies(part.graph), part.graph.find_nodes(op="placeholder")
    free_nodes = [n for n in inputs if n.name in resident]
    free_nodes += part.graph.find_nodes(op="get_attr")
    free = {s for n in free_nodes for s in facts.storages[n]}
    last: dict[_Storage, int] = {}
    releases_gradients = bool(marks(part.graph))
    for place, node in enumerate(part.graph.nodes):
        if node.op != "output" or not releases_gradients:  # marks still need the others
            last |= {s: place for one in node.all_input_nodes for s in facts.storages[one]}
    given = {s for n in inputs for s in facts.storages[n]} - free
    most = sum(map(facts.bytes_of, given))
    live = given & last.keys()
    for place, node in enumerate(part.graph.nodes):
        if node.op == "call_function" and not is_mark(node):
            live |= facts.storages[node] - free
            most = max(most, sum(map(facts.bytes_of, live)))
        live = {s for s in live if last.get(s, place) > place or node.op == "placeholder"}
    return most


# Ops that inputs' gradients do not need may run in either part. A cast, a mask, a bias's sum: run
# early, their results are held in place of what they read. Products stay late. What is held is a
# minimum cut (Ford and Fulkerson 1956, https://doi.org/10.4153/CJM-1956-045-5), as in
# torch/_functorch/partitioners.py: an arc is a storage's bytes.

_SOURCE, _SINK = 0, 1


def split_graph(
    backward: fx.GraphModule, weights: Collection[int], resident: Collection[str] = ()
) -> SplitGraphs:
    """Cut a backward graph of `emit` into I and W; `weights` are places of weights' gradients."""
    return _BackwardCut(backward, weights, resident).graphs()


class _BackwardCut:
    def __init__(
        self, backward: fx.GraphModule, weights: Collection[int], resident: Collection[str]
    ) -> None:
        self.owner = backward
        results: Any = backward.graph.output_node().args[0]
        self.results = list(results)
        self.weights = [i for i in sorted(weights) if isinstance(results[i], fx.Node)]
        self.places: dict[fx.Node, list[int]] = {}
        for place in self.weights:
            self.places.setdefault(results[place], []).append(place)
        self.given = [None if i in self.weights else r for i, r in enumerate(results)]
        self.facts = Dependencies(backward.graph)
        self.nodes = [n for n in backward.graph.nodes if n.op != "output" and not is_mark(n)]
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        self.resident_names = frozenset(resident)
        free = (n for n in self.nodes if n.op == "get_attr" or n.name in resident)
        self.resident = self._storages(free)

    def graphs(self) -> SplitGraphs:
        early = self._early()
        late = self._late(early)
        used = {a for ops in late.values() for node in ops for a in node.all_input_nodes}
        used |= late.keys()
        carried = [n for n in self.nodes if n in early and n in used and n.op != "get_attr"]
        inputs = self._inputs(early, carried)
        weights = self._weights(carried, [n for n in used if n.op == "get_attr"], late)
        held = self._storages(carried) - self.resident
        live = SplitBytes(
            most_live_bytes(inputs, self.resident_names), sum(map(self.facts.bytes_of, held)),
            most_live_bytes(weights, self.resident_names),
        )  # fmt: skip
        reads_tangents = any(is_tangent(node) for node, _ in held)
        n_results, places = len(self.results), tuple(self.weights)
        return SplitGraphs(inputs, weights, n_results, places, live, reads_tangents)

    def _early(self) -> set[fx.Node]:
        given = [r for r in self.given if isinstance(r, fx.Node)]
        early = self._least_held(self._needed_by(given) | self._closure(self.inputs))
        # An op of several results is taken apart at once: held together, all would live.
        return early | {n for n in self.nodes if is_getitem(n) and n.args[0] in early}

    def _least_held(self, early: set[fx.Node]) -> set[fx.Node]:
        """`early`, and the ops that join them for the least bytes held between the two parts."""
        flow = cast("Any", max_flow.SimpleMaxFlow())
        place = {node: i for i, node in enumerate(self.nodes, start=2)}  # 0 and 1 are the ends
        touched = [(place[node], self.facts.touched[node]) for node in self.nodes]
        # The end takes the gradients of weights.
        touched += [(_SINK, self.facts.storages[self.results[i]]) for i in self.weights]
        held: dict[_Storage, list[int]] = {}
        for at, storages in touched:
            for storage in _storages_in_order(storages):
                held.setdefault(storage, []).append(at)
        sizes = {s: 0 if s in self.resident else self.facts.bytes_of(s) for s in held}
        unlimited = sum(sizes.values()) + 1  # no least cut has such an arc
        for node in self.nodes:
            if node in early:
                flow.add_arc_with_capacity(_SOURCE, place[node], unlimited)
            elif is_heavy(node):  # having these late is what the parts are for
                flow.add_arc_with_capacity(place[node], _SINK, unlimited)
            for first in self.facts.before[node]:
                flow.add_arc_with_capacity(place[node], place[first], unlimited)
        for i, (storage, readers) in enumerate(held.items(), start=2 + len(self.nodes)):
            flow.add_arc_with_capacity(place[storage[0]], i, sizes[storage])
            for reader in readers:
                flow.add_arc_with_capacity(i, reader, unlimited)
        flow.solve(_SOURCE, _SINK)
        found = set(
            cast("list[int]", flow.get_source_side_min_cut())
        )  # of least cuts: fewest early
        return {node for node in self.nodes if place[node] in found}

    def _late(self, early: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """For each gradient of weights, the ops of W that it still needs."""
        found, done = dict[fx.Node, list[fx.Node]](), set(early)
        for result in sorted(self.places, key=self._made_at):
            missing = self._needed_by([result]) - done
            done |= missing
            found[result] = self._in_order(n for n in missing if n.op != "get_attr")
        return found

    def _in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def _made_at(self, node: fx.Node) -> tuple[int, int]:
        # Where the storage is made: views of it may come much later.
        makers = (self.order[maker] for maker, _ in self.facts.storages[node])
        return max(makers), self.order[node]

    def _storages(self, nodes: Iterable[fx.Node]) -> frozenset[_Storage]:
        return frozenset[_Storage]().union(*(self.facts.storages[n] for n in nodes))

    def _needed_by(self, results: Sequence[fx.Node]) -> set[fx.Node]:
        """What makes results, and what writes to them until backward ends."""
        storages = self._storages(results)
        writers = [n for n in self.nodes if not storages.isdisjoint(self.facts.written[n])]
        return self._closure([*results, *writers])

    def _closure(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        found = set(ends)
        for node in reversed(self.nodes):
            if node in found:
                found.update(self.facts.before[node])
        return found

    def _inputs(self, early: set[fx.Node], carried: Sequence[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        copies = {node: placeholder_like(graph, node.name, node) for node in self.inputs}
        for node in self.nodes:
            if node in early and node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        results = (*self.given, *carried)
        graph.output(tuple(copies[r] if isinstance(r, fx.Node) else r for r in results))
        return self._module(graph)

    def _weights(
        self, carried: Sequence[fx.Node], constants: Sequence[fx.Node],
        late: Mapping[fx.Node, list[fx.Node]],
    ) -> fx.GraphModule:  # fmt: skip
        graph = fx.Graph()
        copies = {node: placeholder_like(graph, node.name, node) for node in carried}
        for node in self._in_order(constants):
            copies[node] = graph.node_copy(node)
        # Autograd keeps what it is given: not a view of what others hold.
        lent = self._storages([*self.inputs, *(r for r in self.given if isinstance(r, fx.Node))])
        results: list[Any] = [None] * len(self.results)
        for result, ops in late.items():
            for node in ops:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            final, places = copies[result], tuple(self.places[result])
            if not lent.isdisjoint(self.facts.storages[result]):
                final = graph.call_function(torch.ops.aten.clone.default, (final,))
                final.meta = result.meta | {"val": result.meta["val"].clone()}
            # Right after the op that makes it final.
            graph.call_function(release_gradients, (places, (final,) * len(places)))
            for place in places:
                results[place] = final
        graph.output(tuple(results))
        return self._module(graph)

    def _module(self, graph: fx.Graph) -> fx.GraphModule:
        graph.lint()
        return fx.GraphModule(self.owner, graph)
