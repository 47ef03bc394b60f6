"""Random states and numbers as tensors: Inductor moves no draw, and writes no number into code."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.exact_ops import DROPOUT_BACKWARD
from remat.graph_capture.joint.nodes import argument, drawn_on, draws_randomness, is_getitem
from remat.graph_capture.torch_private.core import OpOverload, pytree
from remat.rewriter.graphs.rng import run_with_rng_state, save_rng_state, set_rng_state

# A compiler moves or repeats what has no effects that it sees, and draws from a generator are
# unseen. So a draw takes the state as a tensor and returns the next: random numbers are eager's to
# the bit. Before the first draw the state is read, and after the last it is put into the generator.
# A recomputation draws from the state that was saved.

_library = torch.library.Library("remat", "FRAGMENT")
_wrapped: dict[Any, Any] = {}
_of_numbers: dict[Any, Any] = {}


def make_draws_functional(gm: fx.GraphModule) -> None:
    """Make draws functional, in place; their states come from the generators and go back."""
    drawing = [node for node in gm.graph.nodes if draws_randomness(node)]
    for node in drawing:
        _refuse_own_generator(node)
    devices = tuple(dict.fromkeys(str(drawn_on(node)) for node in drawing))
    read = {device: _state_now(gm.graph, device) for device in devices}
    states = dict(read)
    for node in list(gm.graph.nodes):
        if node in read.values():
            continue
        if node.target is save_rng_state and str(node.args[0]) in states:
            node.replace_all_uses_with(states[str(node.args[0])])
            gm.graph.erase_node(node)
        elif node.target is run_with_rng_state:
            state, device, target, *args = node.args
            _change(node, target, (state, device, *args))  # from what was saved: the stream stays
        elif node in drawing:
            device = str(drawn_on(node))
            _change(node, node.target, (states[device], device, *node.args))
            states[device] = _next_state(node)  # the next draw reads what this one leaves
    with gm.graph.inserting_before(gm.graph.output_node()):
        for device, state in states.items():
            gm.graph.call_function(set_rng_state, (state, device))
    gm.recompile()


def _refuse_own_generator(node: fx.Node) -> None:
    if argument(node, "generator") is not None:
        trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
        raise RewriteError(
            f"draw from the default generator, or rewrite without compile=True: {node.name} "
            f"({node.target}) draws from a generator of its own, which compiled code cannot. "
            f"{trace[-2].strip() if len(trace) > 1 else ''}"
        )


def _state_now(graph: fx.Graph, device: str) -> fx.Node:
    last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last[-1]) if last else graph.inserting_before(None):
        node = graph.call_function(save_rng_state, (device,))
    node.meta["val"] = save_rng_state(device)
    return node


def _change(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let `node` run the functional form of `target`, and let its users read the same results."""
    value = node.meta["val"]
    node.target, node.args = functional_form(target), args
    if isinstance(value, Tensor):
        with node.graph.inserting_after(node):
            only = node.graph.call_function(operator.getitem, (node, 0))
        only.meta = dict(node.meta)  # it returns a tuple, of which users read the first
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


def underlying(node: fx.Node) -> fx.Node:
    """The call that a form wraps, as a node of its own; other nodes as they are."""
    if (plain := _of_numbers.get(node.target)) is not None:
        call = fx.Graph().create_node("call_function", plain, node.args[2:], node.kwargs)
        call.meta = dict(node.meta)
        return underlying(call)
    if (wrapped := _wrapped.get(node.target)) is None:
        return node
    results = node.meta["val"][:-1]
    # Without the state and the device, which come first.
    call = fx.Graph().create_node("call_function", wrapped, node.args[2:], node.kwargs)
    call.meta = {**node.meta, "val": results[0] if len(wrapped._schema.returns) == 1 else results}
    return call


@functools.cache
def functional_form(target: Any) -> Any:
    """`target` without effects: takes ``(state, device)`` first, returns the next state last."""
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


def _runner(target: Any) -> Callable[..., tuple[Any, ...]]:  # by place, as names may clash
    def run(state: Tensor, device: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        now = save_rng_state(device)
        set_rng_state(state, device)
        try:
            return (*_as_tuple(target(*args, **kwargs)), save_rng_state(device))
        finally:
            set_rng_state(now, device)

    return run


def _faked(target: Any) -> Callable[..., tuple[Any, ...]]:
    def run(state: Tensor, device: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*_as_tuple(target(*args, **kwargs)), torch.empty_like(state))

    return run


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


# Numbers that each step reads anew are tensors without dimensions. An op that takes tensors in
# their place is compiled; any other becomes a call of eager's op, which reads them when it runs.


def numbers_as_tensors(gm: fx.GraphModule) -> None:
    """Let ops take the numbers of a `FloatSource` as tensors, in place."""
    for node in list(gm.graph.nodes):
        if not isinstance(node.meta.get("val"), float):  # alone a number that is read is one
            continue
        users = list(node.users)
        with gm.graph.inserting_after(node):
            tensor = gm.graph.call_function(_tensor_of, (node,))
        tensor.meta["val"] = torch.empty((), dtype=torch.float64)
        for user in users:
            user.replace_input_with(node, tensor)
    for node in list(gm.graph.nodes):
        if isinstance(node.target, OpOverload):
            _take_tensors(node)
    gm.recompile()


def _tensor_of(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _take_tensors(node: fx.Node) -> None:
    target: Any = node.target
    if target is DROPOUT_BACKWARD:  # its decomposition multiplies
        return
    wanted = {one.name: str(one.type) for one in target._schema.arguments}
    names = [name for name in wanted if _is_number(argument(node, name))]
    if not any("Tensor" not in wanted[name] for name in names):
        return
    if target._overloadname == "Scalar" and hasattr(target.overloadpacket, "Tensor"):
        node.target = target.overloadpacket.Tensor  # pyright: ignore
        return
    numbers = [argument(node, name) for name in names]
    plain = [float(one.args[0].meta["val"]) for one in numbers]
    of = dict(zip(numbers, plain, strict=True))
    args, kwargs = pytree.tree_map_only(
        fx.Node, lambda one: of.get(one, one), (tuple(node.args), dict(node.kwargs))
    )
    node.target, node.args, node.kwargs = (
        _form_with_numbers(target),
        (numbers, names, *args),
        kwargs,
    )


def _is_number(given: Any) -> bool:
    return isinstance(given, fx.Node) and given.target is _tensor_of


@functools.cache
def _form_with_numbers(target: Any) -> Any:
    """`target`, whose parameters of the names that come second get the tensors that come first."""
    name = f"numbers_{target.name().replace('::', '_').replace('.', '_')}"
    taken, _, given = str(target._schema).partition("(")[2].rpartition(") -> ")
    _library.define(f"{name}(Tensor[] numbers, str[] names, {taken}) -> {given}")
    places = {one.name: i for i, one in enumerate(target._schema.arguments)}

    def run(numbers: Sequence[Tensor], names: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for number, name in zip(numbers, names, strict=True):
            if places[name] < len(given):
                given[places[name]] = number.item()
            else:
                kwargs[name] = number.item()
        return target(*given, **kwargs)

    def fake(numbers: Any, names: Any, /, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{name}", fake, lib=_library)
    made = getattr(torch.ops.remat, name).default
    _of_numbers[made] = target
    return made
