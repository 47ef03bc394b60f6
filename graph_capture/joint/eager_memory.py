"""How long eager holds what a step makes, and where it writes in place: seen while tracing.

Eager frees a tensor when its last reference goes: a variable of the user's code, a list, what
autograd saves. While a step is traced the same code holds stand-ins, which die when eager's would.
A trace is functional, so that an op that writes in place becomes one that makes a new tensor.
"""

from __future__ import annotations

import gc
import math
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from remat.graph_capture.beside_trace import BesideTrace
from remat.graph_capture.graph import Op
from remat.graph_capture.joint.nodes import storage_key

WRITTEN_KEY = "remat_written"
"""Among the annotations of a node that autograd does not record: the op that eager runs there, if
that writes to its argument; else empty."""
MADE_AS, DIED_AS = "remat_made_as", "remat_died_as"
"""On the meta of nodes: their number in the order of the trace, and how many there were when eager
let go of what the node has made."""


@dataclass
class _Held:
    """A storage that eager has now. `nodes` made it and its views, of which `alive` are held."""

    nodes: list[fx.Node] = field(default_factory=list[fx.Node])
    alive: int = 0


class EagerMemory(BesideTrace):
    """Marks the nodes of a trace. Where nothing is traced, it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._tracer: Any = None
        self._held: dict[int, _Held] = {}
        self._alive: set[int] = set()
        self._n_nodes = 0
        self._collects = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and note what it writes to and makes."""
        given = kwargs or {}
        mode = get_proxy_mode()
        if mode is None:
            return func(*args, **given)
        self._tracer = mode.tracer
        if torch.is_grad_enabled():
            results = func(*args, **given)
        else:
            schema = getattr(func, "_schema", None)  # an operator of higher order has none
            written = str(func) if schema is not None and schema.is_mutable else ""
            with fx_traceback.annotate({WRITTEN_KEY: written}):
                results = func(*args, **given)
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, FunctionalTensor):
                self._note(leaf)
        return results

    def __enter__(self) -> Any:
        """What only the garbage collector frees would go at another time in each trace."""
        self._collects = gc.isenabled()
        gc.disable()
        return super().__enter__()

    def __exit__(self, *what: Any) -> None:
        """The trace is over: what goes from now on goes for other reasons."""
        self._held.clear()
        self._tracer = None
        if self._collects:
            gc.enable()
        super().__exit__(*what)

    def _note(self, tensor: FunctionalTensor) -> None:
        node = self._node_of(tensor)
        if node is None:
            return
        key = storage_key(tensor)
        held = self._held.setdefault(key, _Held())
        if id(tensor) in self._alive:  # it was written to, and what it was before is no more
            held.nodes = list(_with_sources(node))
            return
        held.nodes.append(node)
        self._alive.add(id(tensor))
        held.alive += 1
        weakref.finalize(tensor, self._let_go, id(tensor), key, held).atexit = False

    def _node_of(self, tensor: FunctionalTensor) -> fx.Node | None:
        inner: Tensor = torch._from_functional_tensor(tensor.elem)
        slot: Any = get_proxy_slot(inner, self._tracer, None)
        return None if slot is None else slot.proxy.node

    def _let_go(self, tensor: int, key: int, held: _Held) -> None:
        self._alive.discard(tensor)
        held.alive -= 1
        if held.alive == 0 and self._tracer is not None:
            self._held.pop(key, None)
            n_nodes = self._numbered()
            for node in held.nodes:
                node.meta[DIED_AS] = n_nodes

    def _numbered(self) -> int:
        """Number the nodes that have none yet; how many there are."""
        nodes: list[fx.Node] = []
        for node in reversed(self._tracer.graph.nodes):
            if MADE_AS in node.meta:
                break
            nodes.append(node)
        for node in reversed(nodes):
            node.meta[MADE_AS] = self._n_nodes
            self._n_nodes += 1
        return self._n_nodes


def _with_sources(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and what it is a view of: views are made anew after a write through one of them."""
    yield node
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
        yield node


def is_view(node: fx.Node) -> bool:
    """Whether the op returns a view of its first argument, and no list of views."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    is_aliased = len(returns) == 1 and returns[0].alias_info is not None
    return is_aliased and isinstance(node.meta.get("val"), Tensor)


def held_until(
    ops: Sequence[Op], node_of_op: Mapping[str, fx.Node], value_of_node: Mapping[fx.Node, str]
) -> dict[str, str]:
    """For values that eager holds after their last use: the op that is the last to find them."""
    ends: dict[str, int] = {}
    for node, value in value_of_node.items():
        if DIED_AS in node.meta:
            ends[value] = max(ends.get(value, 0), node.meta[DIED_AS])
    last_use = {name: i for i, op in enumerate(ops) for name in (*op.inputs, *op.outputs)}
    # A later phase comes later, whatever the order of the trace is.
    made = list(accumulate((_number_of(node_of_op.get(op.name)) for op in ops), max))
    found: dict[str, str] = {}
    for value, n_nodes in ends.items():
        last = bisect_left(made, n_nodes) - 1
        if last > last_use.get(value, len(ops)):
            found[value] = ops[last].name
    return found


def _number_of(node: fx.Node | None) -> float:
    return 0 if node is None else node.meta.get(MADE_AS, math.inf)
