"""Where eager runs an op that the plan does not: the line from which a failed check began.

A model whose code looks at whether it is traced computes one thing in the trace and another when
it runs. The results only say that; the ops that eager runs say where.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from remat.graph_capture.joint.nodes import is_getitem, plain_name
from remat.graph_capture.joint.provenance import (
    MODULE_KEY,
    SOURCE_KEY,
    path_in_model,
    source_of,
)
from remat.rewriter.graphs.rng import drawn

_COPIES = frozenset({"detach", "alias", "clone", "copy", "_to_copy", "view", "expand"})
"""Copies and casts come and go where writing in place and autocast are taken apart."""


@dataclass(frozen=True)
class _Op:
    """An op by its name and the plain numbers among its arguments, with the user's line."""

    name: str
    numbers: tuple[Any, ...]
    line: str


class _Ran(TorchDispatchMode):
    """The ops that run, in order, with the user's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the op and run it."""
        self.ops.append(_op(func, args, source_of(sys._getframe(1))))
        return func(*args, **(kwargs or {}))


def first_other_line(run: Callable[[], Any], graphs: Iterable[fx.GraphModule]) -> str:
    """The first line at which `run` runs an op that is not in the plan's graphs for that line.

    ``file:line``, with the module where it is known. Empty where all ops are the plan's, as where
    only a tensor that is read differs.
    """
    planned: list[_Op] = []
    modules: dict[str, str] = {}
    for gm in graphs:
        for node in gm.graph.nodes:
            place = node.meta.get("custom") or {}
            if node.op == "call_function" and not is_getitem(node) and place.get(SOURCE_KEY):
                target, args = drawn(node)
                planned.append(_op(target, args, place[SOURCE_KEY]))
                modules.setdefault(place[SOURCE_KEY], path_in_model(place.get(MODULE_KEY, "")))
    with _Ran() as ran:
        run()
    line = _first_outside(ran.ops, planned)
    return f"{line} in module {modules[line]}" if modules.get(line) else line


def _first_outside(ran: list[_Op], planned: list[_Op]) -> str:
    """By names alone first: numbers are also written otherwise where an op is taken apart."""
    for facts in (lambda op: (op.line, op.name), lambda op: (op.line, op.name, op.numbers)):
        known = {facts(op) for op in planned}
        for op in ran:
            if op.line and op.name not in _COPIES and facts(op) not in known:
                return op.line
    return ""


def _op(target: Any, args: tuple[Any, ...], line: str) -> _Op:
    return _Op(
        plain_name(target), tuple(repr(x) for x in args if isinstance(x, (bool, int, float))), line
    )
