"""The subgraphs into which DDP cuts a compiled model, seen as one step.

`torch.compile` cuts at DDP's buckets (`optimize_ddp`), and a backend gets the subgraphs before any
runs. All share memory, so all are planned with the first. Only the object that compiles them knows
the whole: it is looked up on the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import is_getitem
from remat.graph_capture.torch_private.aot import SubmodCompiler, to_fake_tensor
from remat.graph_capture.torch_private.core import FakeTensor, active_ddp_module, pytree
from remat.graph_capture.tracing.resident import storage_bytes
from remat.rewriter.inductor.partition import FusedStep

_Traced = Callable[[fx.GraphModule, Sequence[Any]], FusedStep | None]  # None without gradients


class Subgraph(NamedTuple):
    """One subgraph, and the bytes that others hold while it runs; `step` None without gradients."""

    step: FusedStep | None
    outputs_bytes: int
    beside_bytes: int  # in backward: what later ones leave and return
    after_bytes: int  # as it ends: these, its own, sums for shared ones


class Whole(NamedTuple):
    """Subgraphs in the order of forward; `static_bytes` are of all parameters and buffers."""

    subgraphs: tuple[Subgraph, ...]
    static_bytes: int
    dynamic_bytes: int
    holds_twice: bool


def submod_compiler() -> SubmodCompiler | None:
    """None where nothing is cut."""
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")  # torch hands a backend the subgraph alone
        if isinstance(owner, SubmodCompiler):
            return owner
        frame = frame.f_back
    return None


def whole_of(compiler: SubmodCompiler, traced: _Traced) -> Whole:
    """All subgraphs that `compiler` is about to hand out, the first of them now."""
    walk = _Walk(compiler, traced)
    inputs = compiler.module.graph.find_nodes(op="placeholder")
    with mock.patch.object(compiler.fake_mode, "allow_non_fake_inputs", True):
        walk.run(*(compiler.env.get(node) for node in inputs))
    return walk.whole()


class _Seen(NamedTuple):
    call: fx.Node
    step: FusedStep | None
    outputs_bytes: int


class _Walk(fx.Interpreter):
    """Runs the subgraphs one after the other on fake tensors, and traces each."""

    def __init__(self, compiler: SubmodCompiler, traced: _Traced) -> None:
        super().__init__(compiler.module, garbage_collect_values=False)
        self._mode, self._traced = compiler.fake_mode, traced
        self._known: set[int] = set()
        self._seen: list[_Seen] = []
        self._static_bytes = self._dynamic_bytes = 0

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "placeholder":
            return self._input(getattr(self, n.op)(n.target, args, kwargs))
        if n.op != "call_module":
            return getattr(self, n.op)(n.target, args, kwargs)
        module = self.fetch_attr(str(n.target))
        if (step := self._traced(module, args)) is not None:
            results = [n, *filter(is_getitem, n.users)]
            step.holds_outputs = any(map(_is_given_back, results))  # savers hold the other results
        with self._mode:
            made = module(*args, **kwargs)
        # A result that is a view of an input takes nothing more.
        self._seen.append(_Seen(n, step, storage_bytes(pytree.tree_leaves(made), self._known)))
        # The first subgraph has been changed to return a tuple already, for its compiler alone.
        is_wrapped = isinstance(made, tuple) and not all(map(is_getitem, n.users))
        return made[0] if is_wrapped else made

    def whole(self) -> Whole:
        beside = _Beside([seen.call for seen in self._seen], self.env)
        subgraphs = tuple(
            Subgraph(seen.step, seen.outputs_bytes, beside.while_running(k), beside.afterwards(k))
            for k, seen in enumerate(self._seen)
        )
        holds_twice = not beside.moves_to_buckets  # else gradients lie beside DDP's buckets
        return Whole(subgraphs, self._static_bytes, self._dynamic_bytes, holds_twice)

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        faked = value if isinstance(value, FakeTensor) else to_fake_tensor(value, self._mode)
        if isinstance(value, torch.nn.Parameter):
            self._static_bytes += storage_bytes([faked], self._known)
        else:
            self._dynamic_bytes += storage_bytes([faked], self._known)
        return faked


class _Beside:
    """Gradients that are live while a subgraph runs backward, and are not its own."""

    def __init__(self, calls: list[fx.Node], values: dict[fx.Node, Any]) -> None:
        place = {call: k for k, call in enumerate(calls)}
        trained = [n for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad]
        self._bytes = {node: values[node].nbytes for node in trained}
        self._made = {node: _subgraph_of(node, place) for node in trained}
        readers = {node: {place[user] for user in node.users if user in place} for node in trained}
        self._readers = {node: sorted(found) for node, found in readers.items()}
        ddp = active_ddp_module()
        self.moves_to_buckets = ddp is not None and ddp.gradient_as_bucket_view
        parameters = {n for n in trained if isinstance(values[n], torch.nn.Parameter)}
        exchanged = {n for n in parameters if not getattr(values[n], "_ddp_ignored", False)}
        self._moved = exchanged if self.moves_to_buckets else set[fx.Node]()
        returned = {node for call in calls for node in [call, *call.users] if _is_given_back(node)}
        held = [_held_bytes(values[node]) for node in returned]
        self._returned = [(_subgraph_of(n, place), b) for n, b in zip(returned, held, strict=True)]

    def while_running(self, k: int) -> int:
        """Bytes that subgraphs behind the k-th have left, as its backward runs."""
        returned_bytes = sum(size for made, size in self._returned if made is not None and made > k)
        left = sum(size for node, size in self._bytes.items() if self._is_left(node, k))
        return left + returned_bytes

    def afterwards(self, k: int) -> int:
        own = {node: size for node, size in self._bytes.items() if k in self._readers[node]}
        # Autograd makes the sum of two gradients beside both.
        sums = sum(size for node, size in own.items() if self._readers[node][-1] > k)
        return self.while_running(k) + sum(own.values()) + sums

    def _is_left(self, node: fx.Node, k: int) -> bool:
        """Whether subgraphs behind the k-th have left a gradient of `node` that is still there."""
        if not any(reader > k for reader in self._readers[node]):
            return False
        if (made := self._made[node]) is not None:
            return made < k  # of what a subgraph has made, it is there until that subgraph reads it
        # Of an input it stays, unless it is complete and DDP has moved it into its bucket.
        return node not in self._moved or any(reader <= k for reader in self._readers[node])


def _is_given_back(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _held_bytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    # `Tensor.backward` makes the gradient of a loss, and holds it to the end.
    return value.nbytes * (2 if value.numel() == 1 and value.requires_grad else 1)


def _subgraph_of(node: fx.Node, place: dict[fx.Node, int]) -> int | None:
    """Which subgraph a node is, or is a result of; None for inputs and the output."""
    if node in place:
        return place[node]
    source = node.args[0] if node.op == "call_function" and node.args else None
    return _subgraph_of(source, place) if isinstance(source, fx.Node) else None
