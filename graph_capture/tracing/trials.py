"""Whether users' code may run twice: it is tried on made data, and what it moves is put back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from remat.graph_capture.costs.op_times import KERNEL_ERRORS, cost_key, sample_arguments
from remat.graph_capture.joint.nodes import (
    TRIALS,
    bits_of,
    drawn_on,
    draws_randomness,
    is_custom,
    mutates,
    storage_key,
    tensors_of,
)
from remat.graph_capture.torch_private.core import DisableAutocast, module_of_op, pytree
from remat.graph_capture.tracing.restore import changed_names, restore_names, snapshot

MODULES: dict[Any, str] = {}  # by op that is a function of autograd's, already tried: its module
_tried = set[str]()  # by `cost_key`
_PutBack = Callable[[], str]  # says what has moved; empty if nothing has


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """With their strides, with what lies between elements, and in as many storages."""
    flat = dict[int, Tensor]()
    for one in tensors:
        if (key := storage_key(one)) not in flat:
            elements = one.untyped_storage().nbytes() // one.element_size()
            flat[key] = one.detach().as_strided((elements,), (1,), 0).clone()
    return [
        flat[storage_key(one)].as_strided(one.shape, one.stride(), one.storage_offset())
        for one in tensors
    ]


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether any bit does."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    return not torch.equal(bits_of(one), bits_of(other))


def try_custom_ops(gm: fx.GraphModule) -> None:
    """Have `TRIALS` say of each custom op of a graph whether it may run twice."""
    if torch.distributed.is_initialized():  # it may wait for other ranks
        return
    for node in gm.graph.nodes:
        # An op without results is run for what else it does, and nothing reads it again.
        is_to_try = is_custom(node) and not (draws_randomness(node) or mutates(node))
        is_to_try = is_to_try and any(one is not None for one in tensors_of(node))
        if is_to_try and node.target not in MODULES and (key := cost_key(node)) not in _tried:
            _tried.add(key)
            with contextlib.suppress(*KERNEL_ERRORS):
                TRIALS[node.target] = TRIALS.get(node.target) or _trial(node, gm)


def _trial(node: fx.Node, gm: fx.GraphModule) -> str:
    target: Any = node.target
    with torch.random.fork_rng([drawn_on(node)] if drawn_on(node).type == "cuda" else []):
        leaves, spec = pytree.tree_flatten(sample_arguments(node, gm))
    given = [one for one in leaves if isinstance(one, Tensor)]
    copies = copies_of(given)

    def run(tensors: list[Tensor]) -> list[Any]:
        left = iter(tensors)
        made = [next(left) if isinstance(one, Tensor) else one for one in leaves]
        args, kwargs = pytree.tree_unflatten(made, spec)
        return pytree.tree_leaves(target(*args, **kwargs))

    with DisableAutocast(), torch.no_grad(), what_moves(_modules_behind([node])):
        first = run(copies)
        if any(map(differ, given, copies)):
            return "it writes to its arguments"
        # What a first run fills, such as a cache, does not count.
        with what_moves(_modules_behind([node])) as moved:
            again = run(given)
    return reason_against(zip(first, again, strict=True), moved)


def reason_against(pairs: Iterable[tuple[Any, Any]], moved: Iterable[str]) -> str:
    """Why code must not run twice that returned these at two runs, and moved that."""
    tensors = ((one, other) for one, other in pairs if isinstance(one, Tensor))
    bits = ["it gives other bits for the same data"] if any(starmap(differ, tensors)) else []
    return " and ".join(dict.fromkeys([*moved, *bits]))


def _modules_behind(nodes: Iterable[fx.Node]) -> list[str]:
    """The modules of the Python code that custom ops run, where torch knows it."""
    targets = dict.fromkeys(node.target for node in nodes if is_custom(node))
    found = [MODULES.get(one) or module_of_op(one) for one in targets]
    return [name for name in found if name]


@contextlib.contextmanager
def what_moves(modules: Iterable[str]) -> Generator[list[str]]:
    """Put back the random streams, and what code changes in these modules. The list says what."""
    moved, kept = list[str](), [*_random_streams(), *_namespaces(modules)]
    try:
        yield moved
    finally:
        moved += dict.fromkeys(said for put_back in kept if (said := put_back()))


@contextlib.contextmanager
def numbers_of_users_kept(graph: fx.Graph) -> Generator[None]:
    """Put back what custom ops count in Python, as their own modules hold it."""
    if not any(map(is_custom, graph.nodes)):
        yield
        return
    with what_moves(_modules_behind(graph.nodes)):
        yield


def _random_streams() -> Iterator[_PutBack]:
    yield _stream(random.getstate, random.setstate)
    yield _stream(np.random.get_state, np.random.set_state)
    # `torch.set_rng_state` is refused while a model is traced.
    yield _stream(torch.default_generator.get_state, torch.default_generator.set_state)
    if torch.cuda.is_initialized():
        yield _stream(torch.cuda.get_rng_state, torch.cuda.set_rng_state)


def _stream(read: Callable[[], Any], write: Callable[[Any], Any]) -> _PutBack:
    def bits(state: Any) -> Any:
        parts = (state,) if isinstance(state, Tensor) else state
        return [x.tolist() if isinstance(x, (Tensor, np.ndarray)) else x for x in parts]

    before = read()

    def put_back() -> str:
        if bits(read()) == bits(before):
            return ""
        write(before)
        return "it draws random numbers"

    return put_back


def _namespaces(modules: Iterable[str]) -> Iterator[_PutBack]:
    """The names of each module, and the attributes of its own classes and of their objects."""
    for name in modules:
        space = vars(sys.modules[name]) if name in sys.modules else {}
        yield _put_back_names(name, space, space)
        for key, value in list(space.items()):
            kind: type = value if isinstance(value, type) else type(value)
            own: Any = getattr(value, "__dict__", None)
            if kind.__module__ == name and own is not None:
                yield _put_back_names(f"{name}.{key}", own, value)


def _put_back_names(text: str, space: Any, owner: Any) -> _PutBack:
    before = snapshot(space)

    def put_back() -> str:
        names = list(changed_names(space, before))
        restore_names(space, before, owner)
        return f"it changes {text}.{names[0]}" if names else ""

    return put_back
