"""How far rounding alone moves each result of an eager step.

A step is run with each op's result a little off, by as much as one rounding may be. Results that
move by their own size are made of rounding errors, such as the gradient of a bias before a batch
norm, which is zero on paper. Other code may round otherwise, and such a result is then another.

Source: D. S. Parker, Monte Carlo Arithmetic, 1997.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.joint.nodes import is_getitem, plain_name
from remat.graph_capture.joint.provenance import MODULE_KEY, SOURCE_KEY, path_in_model, source_of
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.op_watcher import OpWatcher
from remat.rewriter.graphs.rng import drawn


class RoundingNoise(OpWatcher):
    """In here, each new result is off by up to one unit in the last place of its dtype.

    The random streams are not touched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = func(*args, **kwargs)
        given = pytree.tree_leaves((args, kwargs))
        # A view, or what is made of no tensor, is no new rounding.
        shares = any(result.alias_info is not None for result in func._schema.returns)
        if shares or not any(isinstance(leaf, Tensor) for leaf in given):
            return results
        return pytree.tree_map(self._moved, results)

    def _moved(self, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        by = torch.empty_like(result).uniform_(-1, 1, generator=self._generator(result.device))
        by.mul_(result).mul_(torch.finfo(result.dtype).eps)
        # Whole numbers stay as they are: they are counts and masks, and most are exact.
        return result + torch.where(result == result.round(), torch.zeros_like(by), by)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            # A stream of its own, as what is compared draws from the device's.
            self._generators[device] = torch.Generator(device=device).manual_seed(0)
        return self._generators[device]


_Outcome = Mapping[str, Any]


def moved_by_rounding(outcome: Callable[[], _Outcome], expected: _Outcome) -> dict[str, float]:
    """For each floating-point result, how far its norm moves if each op rounds otherwise."""
    with RoundingNoise():
        found = outcome()
    return {
        name: float((found[name].double() - like.double()).norm())
        for name, like in expected.items()
        if isinstance(like, Tensor) and like.is_floating_point()
    }


# On a CPU eager itself does not repeat the bits of sums that have no fixed order. Writing to
# indices with `accumulate`, which is also what backward of `x[indices]` does, adds from all threads
# at once. In torch 2.11 to 2.14 that holds for float32 alone; sums by `index_add`, `scatter_add`
# and embeddings have an order on a CPU.


_ACCUMULATE_AT = {"index_put": 3, "_unsafe_index_put": 3, "_index_put_impl": 3, "put": 3}
"""Ops that add so, each with the place of its argument `accumulate`."""


class DeterministicReductions(OpWatcher):
    """In here such sums have one order, so that a plan that is wrong by a little shows."""

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plain_name(func) not in _ACCUMULATE_AT:
            return func(*args, **kwargs)
        # Around these ops alone: a rewritten module refuses to run in another setting than the one
        # that it was planned in.
        torch.use_deterministic_algorithms(True)
        try:
            return func(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(False)


def has_nondeterministic_sums(module: nn.Module) -> bool:
    kinds: list[Any] = [type(m) for m in module.modules()]  # of its own, which holds the plan
    steps = [kind._remat_compiled_step for kind in kinds if hasattr(kind, "_remat_compiled_step")]
    return any(
        adds_nondeterministically(graph) for one in steps for graph in (one.forward, one.backward)
    )


def adds_nondeterministically(gm: fx.GraphModule) -> bool:
    if torch.get_num_threads() == 1 or torch.are_deterministic_algorithms_enabled():
        return False
    return any(_adds_at_once(node) for node in gm.graph.nodes)


def _adds_at_once(node: fx.Node) -> bool:
    at = _ACCUMULATE_AT.get(plain_name(node.target))
    if at is None:
        return False
    value = node.meta.get("val")
    has_order = isinstance(value, Tensor) and value.dtype != torch.float32
    return not has_order and bool(_argument(node, at, "accumulate"))


def _argument(node: fx.Node, at: int, name: str) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, False)


# A model whose code looks at whether it is traced computes one thing in the trace and another when
# it runs. The results only say that; the ops that eager runs say where.


_COPIES = frozenset({"detach", "alias", "clone", "copy", "_to_copy", "view", "expand"})
"""Copies and casts come and go where writing in place and autocast are taken apart."""


@dataclass(frozen=True)
class _Op:
    name: str
    numbers: tuple[Any, ...]
    line: str


class _Ran(OpWatcher):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = sys._getframe(2)  # beyond the watcher's own
        self.ops.append(_op(func, args, source_of(caller)))
        return func(*args, **kwargs)


def first_divergent_line(run: Callable[[], Any], graphs: Iterable[fx.GraphModule]) -> str:
    """The first ``file:line`` at which `run` runs an op that the plan's graphs do not have there.

    With the module where it is known. Empty where all ops are the plan's, as where only a tensor
    that is read differs.
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
    # By names alone first: numbers are also written otherwise where an op is taken apart.
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
