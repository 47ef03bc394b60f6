"""The quickest Python callables that run exactly a given ATen op.

`torch.ops.aten.mm.default(a, b)` matches its arguments against a schema at each call. That takes
one to two microseconds more than `torch.mm(a, b)`, whose parser is generated. Which op such a
function runs depends on its arguments. So each is tried once on the fake tensors of the trace, and
taken only if it runs the same overload with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_C: Any = torch._C
_NAMESPACES: tuple[Any, ...] = (
    _C._VariableFunctions,
    torch.Tensor,
    _C._nn,
    _C._linalg,
    _C._special,
    _C._fft,
)
_REJECTED = (TypeError, ValueError, RuntimeError)
"""What a function raises if its parameters are not those of the op."""


class Bindings:
    """Callables for the nodes of a graph. Each kind of call is tried once."""

    def __init__(self) -> None:
        self._known: dict[Any, Callable[..., Any]] = {}

    def of(self, node: fx.Node) -> Callable[..., Any]:
        """What to call in place of the node's target, with the same arguments."""
        target = node.target
        assert callable(target)
        if not isinstance(target, torch._ops.OpOverload):
            return target
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n: n.meta.get("val"), (tuple(node.args), dict(node.kwargs))
        )
        key = (target, *(_kind(leaf) for leaf in _leaves(args, kwargs)))
        if key not in self._known:
            self._known[key] = _quickest(target, args, kwargs)
        return self._known[key]


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for one in (*args, *kwargs.items()):
        yield from one if isinstance(one, (tuple, list)) else (one,)


def _kind(leaf: Any) -> Any:
    """What a parser tells apart. It may take a tensor without dimensions for a number."""
    if isinstance(leaf, Tensor):
        return Tensor, leaf.dtype, leaf.dim() == 0
    return leaf if isinstance(leaf, str) else type(leaf)


def _quickest(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    name = target._opname
    if target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags:
        for space in _NAMESPACES:
            candidate = getattr(space, name, None)
            if candidate is not None and _runs_same(candidate, target, args, kwargs):
                return candidate
    return target._op


def _runs_same(
    candidate: Callable[..., Any],
    target: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Whether `candidate` runs `target` alone, on the very arguments."""
    recorder = _Recorder()
    try:
        with torch.no_grad(), recorder:
            candidate(*args, **kwargs)
    except _REJECTED:
        return False
    return len(recorder.calls) == 1 and _same_call(recorder.calls[0], (target, args, kwargs))


class _Recorder(TorchDispatchMode):
    """Remembers each op that is run, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _same_call(found: Call, wanted: Call) -> bool:
    if found[0] is not wanted[0]:
        return False
    parameters = found[0]._schema.arguments
    return all(
        _same(_given(parameter, i, found), _given(parameter, i, wanted))
        for i, parameter in enumerate(parameters)
    )


def _given(parameter: Any, i: int, call: Call) -> Any:
    _, args, kwargs = call
    return args[i] if i < len(args) else kwargs.get(parameter.name, parameter.default_value)


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor) or isinstance(found, Tensor):
        return found is wanted
    if isinstance(wanted, (tuple, list)) and isinstance(found, (tuple, list)):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return type(found) is type(wanted) and found == wanted
