"""Functions of autograd whose backward runs forward once more and differentiates that, as
checkpoints that are written by hand do: traced as they are."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Generator
from itertools import count
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from remat.graph_capture.joint.nodes import aten, draws_randomness, is_alias_of_input
from remat.graph_capture.joint.output_aliasing import lay_out_again
from remat.graph_capture.joint.provenance import CHECKPOINT_KEY, COVERED_KEY
from remat.graph_capture.torch_private.aot import notes_of_backward
from remat.graph_capture.torch_private.core import (
    BackwardFunction,
    calls_of_functions,
    reentrant_checkpoints,
)
from remat.graph_capture.tracing.step_module import StepModule

_NESTED, _SETS_STREAM = "remat_nested", "remat_sets_stream"
_VIEWS = (aten.view.default, aten.alias.default, aten.view_as.default)
_DIFFERENTIATES = frozenset({"enable_grad", "backward", "grad"})


def differentiates(kind: type[Function]) -> bool:
    """Whether the backward of a user's function names what differentiates."""
    code = getattr(inspect.unwrap(kind.backward), "__code__", None)
    is_own = (
        str(kind.__module__).startswith(("torch.", "remat.")) and kind is not CheckpointFunction
    )
    return not is_own and code is not None and not _DIFFERENTIATES.isdisjoint(code.co_names)


@contextlib.contextmanager
def nested_backward(step: StepModule) -> Generator[None]:
    """Have such a backward see the parameters that forward had in the trace, and count what it adds
    to their gradients itself."""
    of_torch, whole, run = torch.autograd.grad, torch.autograd.backward, BackwardFunction.apply
    added = dict[int, Tensor]()  # gradients by the identity of parameters
    depth, numbers = 0, count(1)

    def apply(node: Any, *gradients: Any) -> Any:
        nonlocal depth
        if not differentiates(node._forward_cls):
            return run(node, *gradients)
        depth += 1
        try:
            with step.as_in_forward(), contextlib.ExitStack() as stack:
                stack.enter_context(fx_traceback.annotate({_NESTED: str(next(numbers))}))
                stack.enter_context(_streams_left(stack))
                return run(node, *gradients)
        finally:
            depth -= 1

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if not depth:
            whole(tensors, grad_tensors, *args, **kwargs)
            return
        # Behind a trace's parameters torch has more, so that it would not stop there by itself.
        outputs = _as_list(tensors)
        ends = {id(p): p for p in step.parameters() if p.requires_grad}
        leaves = _leaves_behind(outputs, {p.grad_fn for p in ends.values()})
        inputs = [*ends.values(), *leaves]
        given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
        found: Any = of_torch(outputs, inputs, given, allow_unused=True)
        for tensor, gradient in zip(inputs, found, strict=True):
            if gradient is not None and id(tensor) in ends:
                before = added.get(id(tensor))
                added[id(tensor)] = gradient if before is None else before + gradient
            elif gradient is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

    @functools.wraps(of_torch)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        roots, ends = _as_list(outputs), _as_list(inputs)
        if depth or not all(isinstance(one, Tensor) for one in (*roots, *ends)):
            return of_torch(outputs, inputs, *args, **kwargs)
        # Such a backward is not on the way to the parameters that it adds to: behind a frozen layer
        # it is reached only from a tensor that forward has made require grad.
        known = set(map(id, ends))
        hidden = [one for one in _leaves_behind(roots, set()) if id(one) not in known]
        found: Any = of_torch(outputs, [*ends, *hidden], *args, **kwargs)[: len(ends)]
        own = [added.pop(id(one), None) for one in ends]
        pairs = zip(own, found, strict=True)
        return tuple(a if b is None else b if a is None else a + b for a, b in pairs)

    def covered(kind: type[Function]) -> dict[str, Any]:
        if not differentiates(kind):
            return {}
        annotated = fx_traceback.annotate({COVERED_KEY: str(next(numbers))})
        return {"forward": annotated(kind.forward)}

    # Not on the classes, which are state of the user's.
    BackwardFunction.apply, torch.autograd.grad, torch.autograd.backward = apply, grad, backward
    try:
        with calls_of_functions(covered), reentrant_checkpoints(), notes_of_backward():
            yield
    finally:
        BackwardFunction.apply, torch.autograd.grad, torch.autograd.backward = run, of_torch, whole


def _as_list(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given)


def _leaves_behind(outputs: list[Tensor], ends: set[Any]) -> list[Tensor]:
    """Tensors without a history that the outputs come from, not looking behind these nodes."""
    waiting, seen, found = [one.grad_fn for one in outputs], set(ends), list[Tensor]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


@contextlib.contextmanager
def _streams_left(stack: contextlib.ExitStack) -> Generator[None]:
    """Note where code sets a random stream, as for the numbers that forward has drawn, and leave
    the stream itself."""

    def noted(*_: Any) -> None:
        stack.enter_context(fx_traceback.annotate({_SETS_STREAM: "yes"}))

    modules: tuple[Any, ...] = (torch, torch.random, torch.cuda)
    places = [(module, module.set_rng_state) for module in modules]
    for module, _ in places:
        module.set_rng_state = noted
    try:
        yield
    finally:
        for module, before in places:
            module.set_rng_state = before


def merge_recomputed(graph: fx.Graph) -> None:
    """Have what such a backward computes again be what forward has computed: a plan decides itself
    what runs twice. Forward's ops are noted as those of a checkpoint."""
    if not any(_NESTED in _noted(node) for node in graph.nodes):
        return
    first = dict[str, fx.Node]()
    same = dict[fx.Node, fx.Node]()  # for a node, the first of the same numbers
    merged = set[fx.Node]()

    def known(node: fx.Node) -> fx.Node:
        return same.get(node, node)

    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if is_alias_of_input(node) or _is_idle_view(node):
            same[node] = known(node.all_input_nodes[0])
            continue
        key = repr((node.target, *fx.map_arg((node.args, node.kwargs), known)))
        if _NESTED not in _noted(node):
            first.setdefault(key, node)
        elif key in first and (not draws_randomness(node) or _SETS_STREAM in _noted(node)):
            same[node] = first[key]
            merged.add(first[key])
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
    lay_out_again(graph, set(merged))  # a copy, to which it adds
    numbers = {_noted(node).get(COVERED_KEY) for node in merged} - {None}
    for node in graph.nodes:
        if (number := _noted(node).get(COVERED_KEY)) in numbers:
            node.meta["custom"] = {**_noted(node), CHECKPOINT_KEY: f"by hand {number}"}


def _noted(node: fx.Node) -> dict[str, str]:
    return node.meta.get("custom") or {}


def _is_idle_view(node: fx.Node) -> bool:
    if node.target not in _VIEWS:
        return False
    now, before = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return now.shape == before.shape and now.stride() == before.stride()
