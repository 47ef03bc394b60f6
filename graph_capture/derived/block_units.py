"""The whole step with each block as one unit: its ops stand together, in forward and in backward.

Blocks are solved and chosen on this graph, so that the measure stays the whole step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import msgspec

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op, TrainingGraph

Item = tuple[Op, ...]
"""Ops that run as one: those of a block in one phase, or one op alone."""


@dataclass(frozen=True)
class Unit:
    """A block: ops start..stop-1 in forward, and back_start..back_stop-1 in backward."""

    path: str
    start: int
    stop: int
    back_start: int
    back_stop: int


def with_units(
    graph: TrainingGraph, ops_of: Mapping[str, Sequence[str]]
) -> tuple[TrainingGraph, list[Unit]]:
    """`graph` with its ops in an order in which each block runs as one, and the place of each.

    Parameters
    ----------
    ops_of : names of the ops of each block, by its path.

    Raises
    ------
    CaptureError : the blocks do not run one after the other and back.
    """
    path_of = {op: path for path, names in ops_of.items() for op in names}
    n = graph.n_forward
    phases = [_items(graph.ops[:n], path_of), _items(graph.ops[n:], path_of)]
    ordered = tuple(op for items in phases for item in _in_order(items) for op in item)
    places: dict[str, list[int]] = {path: [] for path in ops_of}
    for i, op in enumerate(ordered):
        if op.name in path_of:
            places[path_of[op.name]].append(i)
    units = [_unit(path, found, n) for path, found in places.items()]
    units.sort(key=lambda unit: unit.start)
    for before, after in pairwise(units):
        if after.back_start > before.back_start:
            raise CaptureError(
                f"block {after.path} runs after {before.path} in forward and also in backward, so "
                "they are branches and not a chain: narrow the pattern to blocks that feed one "
                "another, or plan the whole model with remat.rematerialize"
            )
    return msgspec.structs.replace(graph, ops=ordered), units


def _unit(path: str, places: Sequence[int], n_forward: int) -> Unit:
    forward = [i for i in places if i < n_forward]
    backward = [i for i in places if i >= n_forward]
    return Unit(path, forward[0], forward[-1] + 1, backward[0], backward[-1] + 1)


def _items(ops: Sequence[Op], path_of: Mapping[str, str]) -> list[Item]:
    """Items in the order of their first ops."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        path = path_of.get(op.name)
        found.setdefault(f"op {op.name}" if path is None else f"block {path}", []).append(op)
    return [tuple(item) for item in found.values()]


def _in_order(items: Sequence[Item]) -> list[Item]:
    """The items in their order, but each after those whose values it reads."""
    maker = {value: i for i, item in enumerate(items) for op in item for value in op.outputs}
    readers: list[list[int]] = [[] for _ in items]
    waits_for = [0] * len(items)
    for i, item in enumerate(items):
        reads = {maker[value] for op in item for value in op.inputs if value in maker} - {i}
        waits_for[i] = len(reads)
        for other in reads:
            readers[other].append(i)
    ready = [i for i, count in enumerate(waits_for) if not count]
    done: list[Item] = []
    while ready:
        i = heapq.heappop(ready)
        done.append(items[i])
        for reader in readers[i]:
            waits_for[reader] -= 1
            if not waits_for[reader]:
                heapq.heappush(ready, reader)
    if len(done) < len(items):
        stuck = next(item[0] for i, item in enumerate(items) if waits_for[i])
        raise CaptureError(
            f"op {stuck.name} of {stuck.module or 'the model'} reads what a block makes and is "
            "read by it again, so the block cannot run as one: narrow the pattern"
        )
    return done


def ops_by_block(graph: TrainingGraph, pattern: str) -> dict[str, list[str]]:
    """Names of the ops of each module whose path matches a glob, by their module paths.

    A backward op without a module, such as a sum of gradients, goes with the op before it.

    Raises
    ------
    CaptureError : the glob matches no module of a forward op.
    """
    n = graph.n_forward
    found: dict[str, list[str]] = {}
    for op in graph.ops[:n]:
        path = _matching(op.module, pattern)
        if path:
            found.setdefault(path, []).append(op.name)
    if not found:
        modules = list(dict.fromkeys(op.module for op in graph.ops[:n] if op.module))
        raise CaptureError(
            f"pattern '{pattern}' matches no module of a forward op of {graph.name}; these are "
            f"{', '.join(modules[:5])}. Blocks are named by their paths, such as 'model.layers.*'"
        )
    path = ""
    for op in graph.ops[n:]:
        path = _matching(op.module, pattern) if op.module else path
        if path in found:
            found[path].append(op.name)
    return found


def _matching(module: str, pattern: str) -> str:
    """The shortest path, of the module or above it, that matches; empty if none does."""
    parts = module.split(".")
    paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((path for path in paths if path and fnmatchcase(path, pattern)), "")
