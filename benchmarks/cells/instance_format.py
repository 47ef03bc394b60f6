"""Instance files: a graph of nodes with costs and bytes, as JSON.

Graphs of others come in this form.

One object with `nodes` (`id`, `cost`, `bytes`, and a `name` if there is one), `edges` (pairs
of ids, producer first), `order` (ids in the order of first computations; without it, the
first order that the edges allow) and `constant_bytes`, which are resident. Other fields are not
read. Nothing need be live at the end. While a node is computed, memory holds all live results,
its own included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from remat.graph_capture.errors import FileError, RematError, ShapeError, TextError
from remat.graph_capture.files import decode_json, read_contents
from remat.graph_capture.graph import MOST_BYTES, MOST_US, Op, Resident, TrainingGraph, Value

Id = int | str
Number = int | float
SHOWN = 12


class InstanceError(RematError, ValueError):
    """The file is no instance; the message says what was found and where."""


class Node(msgspec.Struct, frozen=True):
    """One operation with one result: its cost in the file's unit, its result in bytes."""

    id: Id
    cost: Number
    bytes: int
    name: str = ""


class Instance(msgspec.Struct, frozen=True):
    """The contents of an instance file. Read one by `read_instance`, which checks it."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[Id, Id], ...]
    order: tuple[Id, ...] | None = None
    name: str = ""
    constant_bytes: int = 0

    @property
    def costs_are_whole(self) -> bool:
        """Whether every cost is an integer in the file."""
        return all(isinstance(node.cost, int) for node in self.nodes)


def read_instance(path: Path) -> Instance:
    """Read and check a file; its `order` is filled in where the file has none.

    Raises
    ------
    InstanceError : missing, not JSON, or not an instance.
    """
    try:
        return checked(decode_json(read_contents(path), Instance))
    except FileError as error:
        raise InstanceError(f"cannot read {error}") from error
    except ShapeError as error:
        raise InstanceError(f"{path} is no instance file: {error}") from error
    except TextError as error:
        raise InstanceError(f"{path} is not JSON: {error}") from error
    except InstanceError as error:
        raise InstanceError(f"{path}: {error}") from error


def checked(instance: Instance) -> Instance:
    """The instance with its order; raises `InstanceError` where it contradicts itself."""
    if not instance.nodes:
        raise InstanceError("there are no nodes")
    ids = [node.id for node in instance.nodes]
    if len(set(ids)) < len(ids):
        raise InstanceError(f"node id {_first_twice(ids)!r} is given twice")
    unlike = next((node for node in ids if type(node) is not type(ids[0])), ids[0])
    if unlike != ids[0]:
        raise InstanceError(f"node ids are numbers or texts, not both: {ids[0]!r} and {unlike!r}")
    if instance.constant_bytes < 0:
        raise InstanceError(f"constant_bytes is negative: {instance.constant_bytes}")
    for node in instance.nodes:
        _check_node(node)
    known = set(ids)
    for source, target in instance.edges:
        for end in (source, target):
            if end not in known:
                raise InstanceError(f"edge [{source!r}, {target!r}] names a missing node: {end!r}")
    possible = _topological(ids, instance.edges)
    if instance.order is None:
        return msgspec.structs.replace(instance, order=possible)
    _check_order(instance.order, ids, instance.edges)
    return instance


def _check_node(node: Node) -> None:
    if node.bytes < 0:
        raise InstanceError(f"node {node.id!r} has negative bytes: {node.bytes}")
    if node.bytes >= MOST_BYTES:
        raise InstanceError(f"node {node.id!r} has {MOST_BYTES} bytes or more: are they bytes?")
    if not 0 <= node.cost < math.inf:
        raise InstanceError(f"node {node.id!r} has a negative or infinite cost: {node.cost}")
    if node.cost > MOST_US:
        raise InstanceError(f"node {node.id!r} costs more than {MOST_US}: take a larger unit")


def _check_order(order: tuple[Id, ...], ids: list[Id], edges: Iterable[tuple[Id, Id]]) -> None:
    position = {node: i for i, node in enumerate(order)}
    if len(position) < len(order):
        raise InstanceError(f"order is no permutation: it has {_first_twice(order)!r} twice")
    for node in ids:
        if node not in position:
            raise InstanceError(f"order is no permutation: it lacks node {node!r}")
    if len(order) > len(ids):
        known = set(ids)
        strange = next(node for node in order if node not in known)
        raise InstanceError(f"order is no permutation: {strange!r} is no node")
    for source, target in edges:
        if position[source] >= position[target]:
            raise InstanceError(
                f"order contradicts edge [{source!r}, {target!r}]: {target!r} comes first"
            )


def _first_twice(ids: Iterable[Id]) -> Id:
    seen: set[Id] = set()
    for node in ids:
        if node in seen:
            return node
        seen.add(node)
    raise ValueError("all are distinct")


def _topological(ids: list[Id], edges: Iterable[tuple[Id, Id]]) -> tuple[Id, ...]:
    """An order that the edges allow; raises `InstanceError`, naming a cycle, if none does."""
    readers: dict[Id, list[Id]] = {node: [] for node in ids}
    waiting = dict.fromkeys(ids, 0)
    for source, target in edges:
        readers[source].append(target)
        waiting[target] += 1
    order = [node for node in ids if not waiting[node]]
    for node in order:
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                order.append(reader)
    if len(order) < len(ids):
        raise InstanceError(f"the edges form a cycle: {_cycle(waiting, edges)}")
    return tuple(order)


def _cycle(waiting: Mapping[Id, int], edges: Iterable[tuple[Id, Id]]) -> str:
    """A cycle among the nodes that still wait: each of them has a predecessor that waits."""
    before = {target: source for source, target in edges if waiting[source] and waiting[target]}
    node = next(node for node in waiting if waiting[node])
    walked: dict[Id, None] = {}
    while node not in walked:
        walked[node] = None
        node = before[node]
    path = list(walked)
    cycle = [node, *reversed(path[path.index(node) :])]
    shown = [str(node) for node in cycle[:SHOWN]]
    return " -> ".join([*shown, "..."] if len(cycle) > SHOWN else shown)


def op_name(position: int) -> str:
    """Name of the op, and of its value, for the node at that position of `nodes`."""
    return f"n{position}"


def graph_of(instance: Instance) -> TrainingGraph:
    """The instance as a graph of forward ops with one value each, in `order`."""
    node = {node.id: (op_name(i), node) for i, node in enumerate(instance.nodes)}
    reads: dict[Id, dict[str, None]] = {i: {} for i in node}
    for source, target in instance.edges:
        reads[target][node[source][0]] = None
    ops: list[Op] = []
    values: list[Value] = []
    for i in instance.order or ():
        name, facts = node[i]
        inputs = tuple(reads[i])
        ops.append(Op(name, facts.name or "node", "forward", inputs, (name,), float(facts.cost)))
        values.append(Value(name, facts.bytes, name))
    return TrainingGraph(
        name=instance.name or "instance",
        ops=tuple(ops),
        values=tuple(values),
        resident=Resident(parameters_bytes=instance.constant_bytes),
        device="none",
        cost_origin="given",
    )
