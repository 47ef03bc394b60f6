"""How long eager holds what a step makes, and where it writes in place or makes again.

It is seen while tracing: the same code holds stand-ins, which die when eager's tensors would. A
trace is functional, so an op that writes in place becomes one that makes a new tensor.
"""

from __future__ import annotations

import gc
import math
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import msgspec
import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from remat.graph_capture.graph import ACCUMULATE, UPDATE, Op
from remat.graph_capture.joint.autocast_cache import CachedCast
from remat.graph_capture.joint.nodes import is_view, storage_key, writes, written_arguments
from remat.graph_capture.joint.provenance import CHECKPOINT_KEY
from remat.graph_capture.torch_private.core import (
    FunctionalTensor,
    TraceObserver,
    from_functional,
    functional_mode,
    pytree,
)

WRITTEN_KEY = "remat_written"  # where autograd does not record: eager's op that writes there
RECORDED_KEY = "remat_recorded"  # the same where autograd records; backward's nodes may have both
MADE_AS, _DIED_AS = "remat_made_as", "remat_died_as"  # on meta: when it came, and when eager let go
_OVER = "remat_over"  # on the meta of nodes written in place: a node of the storage written to


@dataclass
class _Held:
    """A storage that eager has now. `nodes` made it and its views, of which `alive` are held."""

    nodes: list[fx.Node] = field(default_factory=list[fx.Node])
    alive: int = 0


class EagerMemory(TraceObserver):
    """Marks the nodes of a trace. Where nothing is traced, it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._tracer: Any = None
        self._held: dict[int, _Held] = {}
        self._alive: set[int] = set()
        self._n_nodes, self._collects = 0, False

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (mode := get_proxy_mode()) is None:
            return func(*args, **kwargs)
        self._tracer = mode.tracer
        if torch.is_inference_mode_enabled():
            functional = functional_mode()  # functionalization would keep what inference mode makes
            held = getattr(functional, "_storage_to_base", None)
            if held is not None and not isinstance(held, _WeakBases):
                functional._storage_to_base = _WeakBases()
        # Before the call, which gives what it writes to other nodes.
        given = pytree.tree_leaves(list(written_arguments(func, args, kwargs)))
        own = [leaf for leaf in given if isinstance(leaf, FunctionalTensor)]
        written = [(one, self._node_of(one)) for one in own]
        key = RECORDED_KEY if torch.is_grad_enabled() else WRITTEN_KEY
        # Noted even if nothing is written: the key itself says whether autograd records.
        with fx_traceback.annotate({key: str(func) if writes(func) else ""}):
            results = func(*args, **kwargs)
        for tensor, before in written:
            now = self._node_of(tensor)
            if now is not None and before is not None and now is not before:
                now.meta[_OVER] = before.name
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, FunctionalTensor):
                self._note(leaf)
        return results

    def __enter__(self) -> Any:
        self._collects = gc.isenabled()  # garbage would go at another time in each trace
        gc.disable()
        return super().__enter__()

    def __exit__(self, *what: Any) -> None:
        self._held.clear()  # what dies from now on, dies for other reasons than in eager
        self._tracer = None
        if self._collects:
            gc.enable()
        super().__exit__(*what)

    def _note(self, tensor: FunctionalTensor) -> None:
        if (node := self._node_of(tensor)) is None:
            return
        key = storage_key(tensor)
        held = self._held.setdefault(key, _Held())
        if id(tensor) in self._alive:  # it was written to, and what it was before is no more
            held.nodes = [node]
            while is_view(held.nodes[-1]):  # functionalization makes views anew after a write
                held.nodes.append(held.nodes[-1].args[0])  # pyright: ignore
            return
        held.nodes.append(node)
        self._alive.add(id(tensor))
        held.alive += 1
        weakref.finalize(tensor, self._let_go, id(tensor), key, held).atexit = False

    def _node_of(self, tensor: FunctionalTensor) -> fx.Node | None:
        slot: Any = get_proxy_slot(from_functional(tensor.elem), self._tracer, None)
        return None if slot is None else slot.proxy.node

    def _let_go(self, tensor: int, key: int, held: _Held) -> None:
        self._alive.discard(tensor)
        held.alive -= 1
        if held.alive == 0 and self._tracer is not None:  # a storage goes with its last tensor
            self._held.pop(key, None)
            nodes = reversed(self._tracer.graph.nodes)  # all before a numbered node are numbered
            for node in reversed(list(takewhile(lambda node: MADE_AS not in node.meta, nodes))):
                node.meta[MADE_AS] = self._n_nodes
                self._n_nodes += 1
            for node in held.nodes:
                node.meta[_DIED_AS] = self._n_nodes


class _WeakBases:
    def __init__(self) -> None:
        self._bases: Any = weakref.WeakKeyDictionary()

    def __setitem__(self, storage: Any, base: FunctionalTensor) -> None:
        self._bases[storage] = weakref.ref(base)

    def get(self, storage: Any) -> FunctionalTensor | None:
        found = self._bases.get(storage)
        return None if found is None else found()


def held_until(
    ops: Sequence[Op], node_of_op: Mapping[str, fx.Node], value_of_node: Mapping[fx.Node, str],
    casts: Sequence[CachedCast],
) -> dict[str, str]:  # fmt: skip
    """For values that eager holds after their last use: the op that is the last to find them."""
    ends: dict[str, int] = {}
    for node, value in value_of_node.items():
        if _DIED_AS in node.meta:
            ends[value] = max(ends.get(value, 0), node.meta[_DIED_AS])
    released = {v for op in ops if op.target in (ACCUMULATE, UPDATE) for v in op.inputs}
    last_use = {name: i for i, op in enumerate(ops) for name in (*op.inputs, *op.outputs)}
    # A later phase comes later, whatever the order of the trace is.
    made = list(accumulate((_number_of(node_of_op.get(op.name)) for op in ops), max))
    ends = {value: bisect_left(made, n_nodes) - 1 for value, n_nodes in ends.items()}
    for (value, *_), last in casts:  # autocast keeps a cast to the end of the region
        ends[value] = max(ends.get(value, 0), last)
    # A released gradient goes with the op that releases it.
    late = ((v, last) for v, last in ends.items() if last > last_use.get(v, len(ops)))
    return {value: ops[last].name for value, last in late if value not in released}


def written_over(
    value_of_node: Mapping[fx.Node, str], casts: Sequence[CachedCast], made_as: Mapping[str, int]
) -> dict[str, str]:
    """For values that eager writes over an older one, or finds in autocast's cache: that one."""
    value_named = {node.name: value for node, value in value_of_node.items()}
    found = {value: first for (first, *others), _ in casts for value in others}
    for node, value in value_of_node.items():
        over = value_named.get(node.meta.get(_OVER, ""), "")
        if over and value and made_as[over] < made_as[value]:
            found[value] = over
    return found


def with_checkpoints(ops: Iterable[Op], node_of_op: Mapping[str, fx.Node]) -> Iterator[Op]:
    """Ops of forward, with the number of the user's checkpoint that covers each, from 1 on."""
    number: dict[str, int] = {}
    for op in ops:
        node = node_of_op.get(op.name)
        own = node.meta.get("custom", {}).get(CHECKPOINT_KEY) if node is not None else None
        if own is not None:
            op = msgspec.structs.replace(op, checkpoint=number.setdefault(own, len(number) + 1))
        yield op


def is_held_past(node: fx.Node, later: fx.Node) -> bool:
    return node.op == "placeholder" or node.meta.get(_DIED_AS, 0) > _number_of(later)


def _number_of(node: fx.Node | None) -> float:
    return 0 if node is None else node.meta.get(MADE_AS, math.inf)
