"""Ops that draw, as functions of the random stream's state.

A compiler may move, drop or repeat what has no effects that it sees, and it does not see that an op
draws from a generator. So each op that draws takes the state as a tensor, and returns the next
state beside its results. Then the data alone say what is drawn when, and random numbers are eager's
to the bit. The state enters a graph as an input and leaves it as an output; the caller of the graph
puts it into the generator. A recomputation draws from the state that was saved.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.nodes import argument, drawn_on, draws_randomness, is_getitem
from remat.rewriter.graphs.rng import run_with_rng_state, save_rng_state, set_rng_state

_library = torch.library.Library("remat", "FRAGMENT")
_STATE = "random_state_"
_wrapped: dict[Any, Any] = {}


def make_functional(gm: fx.GraphModule) -> tuple[str, ...]:
    """Make functional, in place, what draws and what saves or puts back the stream.

    Returns the devices whose streams the graph draws from. For each, in this order, the graph gets
    one more input at the end, the state before it, and one more output, the state after it.
    """
    drawing = [node for node in gm.graph.nodes if draws_randomness(node)]
    for node in drawing:
        _refuse_own_generator(node)
    devices = tuple(dict.fromkeys(str(drawn_on(node)) for node in drawing))
    states = {device: _state_input(gm.graph, device) for device in devices}
    for node in list(gm.graph.nodes):
        if node.target is save_rng_state:
            node.replace_all_uses_with(states[str(node.args[0])])
            gm.graph.erase_node(node)
        elif node.target is run_with_rng_state:
            state, device, target, *args = node.args
            # It draws from what was saved, so the stream's state stays.
            _change(node, target, (state, device, *args))
        elif node in drawing:
            device = str(drawn_on(node))
            _change(node, node.target, (states[device], device, *node.args))
            # The next draw reads what this one leaves, so the data alone order draws.
            states[device] = _next_state(node)
    _add_outputs(gm.graph, list(states.values()))
    gm.recompile()
    return devices


def _refuse_own_generator(node: fx.Node) -> None:
    if argument(node, "generator") is not None:
        trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
        raise RewriteError(
            f"{node.name} ({node.target}) draws from a generator of its own. Compiled code "
            f"cannot do that: let it draw from the default one, or rewrite without compile=True. "
            f"{trace[-2].strip() if len(trace) > 1 else ''}"
        )


def _state_input(graph: fx.Graph, device: str) -> fx.Node:
    last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last[-1]) if last else graph.inserting_before(None):
        node = graph.placeholder(f"{_STATE}{device.replace(':', '_')}")
    node.meta["val"] = save_rng_state(device)
    return node


def _change(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let `node` run the functional form of `target`, and let its users read the same results."""
    value = node.meta["val"]
    node.target, node.args = functional_form(target), args
    if isinstance(value, Tensor):
        with node.graph.inserting_after(node):
            only = node.graph.call_function(operator.getitem, (node, 0))
        # A functional form returns a tuple, of which users read the first.
        only.meta = dict(node.meta)
        node.replace_all_uses_with(only, delete_user_cb=lambda user: user is not only)
    results = (value,) if isinstance(value, Tensor) else tuple(value)
    node.meta = {**node.meta, "val": (*results, node.args[0].meta["val"])}  # pyright: ignore


def _next_state(node: fx.Node) -> fx.Node:
    results: Any = node.meta["val"]
    after = node
    while is_getitem(after.next):
        after = after.next
    with node.graph.inserting_after(after):
        state = node.graph.call_function(operator.getitem, (node, len(results) - 1))
    state.meta["val"] = results[-1]
    return state


def _add_outputs(graph: fx.Graph, states: Sequence[fx.Node]) -> None:
    end = graph.output_node()
    returned: Any = end.args[0]
    end.args = ((*returned, *states),)


def underlying(node: fx.Node) -> fx.Node:
    """The call that a functional form wraps, as a node of its own; other nodes as they are."""
    wrapped = _wrapped.get(node.target)
    if wrapped is None:
        return node
    results = node.meta["val"][:-1]
    # Without the state and the device, which come first.
    call = fx.Graph().create_node("call_function", wrapped, node.args[2:], node.kwargs)
    call.meta = {**node.meta, "val": results[0] if len(wrapped._schema.returns) == 1 else results}
    return call


@functools.cache
def functional_form(target: Any) -> Any:
    """`target` as an op without effects, which leaves the generator as it was.

    It takes ``(state, device)`` before the arguments of `target`, and returns the next state after
    the results of `target`.
    """
    name = f"functional_{target.name().replace('::', '_').replace('.', '_')}"
    _library.define(_schema(name, target))
    _library.impl(name, _runner(target), "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{name}", _faked(target), lib=_library)
    made = getattr(torch.ops.remat, name).default
    _wrapped[made] = target
    return made


def _schema(name: str, target: Any) -> str:
    taken, _, given = str(target._schema).partition("(")[2].rpartition(") -> ")
    results = given.removeprefix("(").removesuffix(")")
    return f"{name}(Tensor random_state, str drawn_on, {taken}) -> ({results}, Tensor)"


# `target` may have arguments of the names that the first two have here, so these are by place only.
def _runner(target: Any) -> Callable[..., tuple[Any, ...]]:
    def run(state: Tensor, device: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        now = save_rng_state(device)
        set_rng_state(state, device)
        try:
            results = target(*args, **kwargs)
            return (*_as_tuple(results), save_rng_state(device))
        finally:
            set_rng_state(now, device)

    return run


def _faked(target: Any) -> Callable[..., tuple[Any, ...]]:
    def run(state: Tensor, device: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*_as_tuple(target(*args, **kwargs)), torch.empty_like(state))

    return run


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)
