"""Outcomes of a step, compared bit for bit, or to a tolerance; and how far rounding moves them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.graph import FLOAT32_BYTES
from remat.graph_capture.joint.nodes import argument, bits_of, is_getitem, plain_name
from remat.graph_capture.joint.provenance import MODULE_KEY, SOURCE_KEY, path_in_model, source_of
from remat.graph_capture.torch_private.core import OpWatcher, pytree
from remat.rewriter.graphs.rng import drawn
from remat.schedules.outcome import Rounding

Outcome = Mapping[str, Any]  # by name: outputs, gradients, buffers, random streams

_TIMES = 10.0  # beyond eager's own distance: both are roundings, a wrong gradient is far more

_TOLERANCE = 0.01
"""For compiled steps, part of the norm: fused kernels round otherwise, up to 1e-3 with batch norm;
a wrong gradient, as of another dropout mask, is off by its own size."""
_LEAST_PART = 1e-3  # of the norm of its kind; smaller results are rounding errors
_ROUNDINGS = 16  # units in the last place that few bits may always be off by
_MOST_ROUNDING = _ROUNDINGS * torch.finfo(torch.bfloat16).eps
"""The most, 0.125, that rounding excuses; that of another dropout mask is off by more."""


class EagerVariation:
    """How far runs of eager from one state are from the first of them, which gave `expected`."""

    def __init__(self, expected: Outcome) -> None:
        self.expected = expected
        self.noise: dict[str, float] = {}  # largest distance of an element, by tensor; else 0

    def add(self, again: Outcome) -> None:
        for name in unsteady_names(self.expected, again):
            noise = distance(self.expected[name], again.get(name))
            self.noise[name] = max(self.noise.get(name, 0.0), 0.0 if math.isnan(noise) else noise)


def differing_names(variation: EagerVariation, found: Outcome) -> tuple[str, ...]:
    expected, noise = variation.expected, variation.noise
    differing = [name for name in expected if not bitwise_equal(expected[name], found.get(name))]
    allowed = {name: _TIMES * noise.get(name, -math.inf) for name in differing}
    return tuple(n for n in differing if not distance(expected[n], found.get(n)) <= allowed[n])


def unsteady_names(expected: Outcome, again: Outcome) -> tuple[str, ...]:
    """Names of tensors that two runs of eager, from the same state, do not give alike."""
    changing = [name for name in expected if not bitwise_equal(expected[name], again.get(name))]
    return tuple(name for name in changing if isinstance(expected[name], Tensor))


def distance(expected: Any, found: Any) -> float:
    """The largest difference between elements; NaN where there is none to take."""
    if not _has_error(expected, found):
        return float("nan")
    return float((found.double() - expected.double()).abs().max())


def differing_beyond(
    expected: Outcome, found: Outcome, tolerance: float, moved: Mapping[str, float] | None = None
) -> tuple[tuple[str, ...], float]:
    """Names of what is further off than `tolerance`, and the largest relative error.

    Results may be off by what rounding alone moves them (`moved`), and by `_TIMES` of that up to
    `_MOST_ROUNDING`. One that is no larger than that is noise, with the tolerance of its kind.
    """
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for name, like in expected.items():
        if not _has_error(like, found.get(name)):
            # A random stream and the like has no error to tolerate.
            wrong += [] if bitwise_equal(like, found.get(name)) else [name]
            continue
        by_rounding = (moved or {}).get(name, 0.0)
        rounding = _TIMES * by_rounding
        size, least = _size(expected, name, rounding), _least(like, rounding) if tolerance else 0.0
        off = _norm(found[name].double() - like.double())
        errors[name] = off / size if size else 0.0
        if not (errors[name] <= max(tolerance, least) or off <= by_rounding):
            wrong.append(name)
    return tuple(wrong), max(errors.values(), default=0.0)


def _size(expected: Outcome, name: str, rounding: float) -> float:
    norm, kind = _norm(expected[name]), name.split()[0]
    alike = [t for other, t in expected.items() if other.split()[0] == kind]
    of_all = sum(_norm(t) ** 2 for t in alike if isinstance(t, Tensor)) ** 0.5
    # Noise sums to other noise in other code: only its part in all results of its kind matters.
    return of_all if 0 < norm <= rounding else max(norm, _LEAST_PART * of_all)


def _least(like: Tensor, rounding: float) -> float:
    own, norm = _ROUNDINGS * torch.finfo(like.dtype).eps, _norm(like)
    return max(own, min(_MOST_ROUNDING, rounding / norm)) if norm > rounding else own


def _has_error(expected: Any, found: Any) -> bool:
    return (
        isinstance(expected, Tensor)
        and isinstance(found, Tensor)
        and expected.is_floating_point()
        and (expected.dtype, expected.shape) == (found.dtype, found.shape)
        and not bitwise_equal(expected, found)
    )


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


def bitwise_equal(expected: Any, found: Any) -> bool:
    """Whether two results have the same bits; a NaN equals a NaN of the same bits."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return False
        if torch.sparse_coo in (expected.layout, found.layout):  # of an embedding's gradient
            pairs = zip(_parts_of_sparse(expected), _parts_of_sparse(found), strict=True)
            return expected.layout is found.layout and all(bitwise_equal(*pair) for pair in pairs)
        return torch.equal(expected, found) or torch.equal(bits_of(expected), bits_of(found))
    return expected is found or bool(expected == found)


def _parts_of_sparse(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor, tensor)


SPLIT_FLOAT32, _SPLIT_HALF = 1e-5, 2e-2
"""Chunks that sum in another order, as a part of the norm: in float32, or with 16 bits in use."""


def rounding_of(module: nn.Module) -> Rounding:
    kind: Any = type(module)  # of its own, which holds the plan
    if not hasattr(kind, "_remat_compiled_step"):
        return ""
    if kind._remat_compiled_step.by_inductor:
        return "inductor"
    if kind._remat_schedule.is_exact:
        return ""
    return "chunks" if kind._remat_schedule.chunks else "levers"


def tolerance_of(module: nn.Module) -> float:
    rounding, kind = rounding_of(module), type(module)
    if rounding == "levers":
        return max(one.tolerance for one in kind._remat_schedule.levers)  # pyright: ignore
    if rounding != "chunks":
        return _TOLERANCE if rounding else 0.0
    is_half = any(is_on for _, is_on, _ in kind._remat_guards.recipe.autocast)  # pyright: ignore
    is_half |= any(parameter.itemsize < FLOAT32_BYTES for parameter in module.parameters())
    return _SPLIT_HALF if is_half else SPLIT_FLOAT32


# Monte Carlo arithmetic (D. S. Parker, 1997): each op's result is off by up to one rounding.
# Results that move by their own size are rounding errors, as a bias's gradient before a batch norm.


class RoundingNoise(OpWatcher):
    """In here, each new result is off by up to one unit in the last place; random streams stay."""

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
        if result.device not in self._generators:
            # A stream of its own, as what is compared draws from the device's.
            self._generators[result.device] = torch.Generator(device=result.device).manual_seed(0)
        by = torch.empty_like(result).uniform_(-1, 1, generator=self._generators[result.device])
        by.mul_(result).mul_(torch.finfo(result.dtype).eps)
        # Whole numbers stay as they are: they are counts and masks, and most are exact.
        return result + torch.where(result == result.round(), torch.zeros_like(by), by)


def moved_by_rounding(outcome: Callable[[], Outcome], expected: Outcome) -> dict[str, float]:
    """For each floating-point result, how far its norm moves if each op rounds otherwise."""
    with RoundingNoise():
        found = outcome()
    return {
        name: _norm(found[name].double() - like.double())
        for name, like in expected.items()
        if isinstance(like, Tensor) and like.is_floating_point()
    }


# Threads add `accumulate` writes to indices at once, as in backward of `x[indices]`: on a CPU eager
# does not repeat such sums. In torch 2.11 to 2.14 that holds for float32 alone.

_ACCUMULATING = ("index_put", "_unsafe_index_put", "_index_put_impl", "put")


class DeterministicReductions(OpWatcher):
    """In here such sums have one order, so that a plan that is wrong by a little shows."""

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plain_name(func) not in _ACCUMULATING:
            return func(*args, **kwargs)
        torch.use_deterministic_algorithms(True)  # alone: a plan refuses to run under it
        try:
            return func(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(False)


def has_nondeterministic_sums(module: nn.Module) -> bool:
    kinds: list[Any] = [type(m) for m in module.modules()]  # of its own, which holds the plan
    steps = [kind._remat_compiled_step for kind in kinds if hasattr(kind, "_remat_compiled_step")]
    return any(adds_nondeterministically(gm) for one in steps for gm in (one.forward, one.backward))


def adds_nondeterministically(gm: fx.GraphModule) -> bool:
    if torch.get_num_threads() == 1 or torch.are_deterministic_algorithms_enabled():
        return False
    adding = [node for node in gm.graph.nodes if plain_name(node.target) in _ACCUMULATING]
    values = [node.meta.get("val") for node in adding if argument(node, "accumulate")]
    return not all(isinstance(one, Tensor) and one.dtype != torch.float32 for one in values)


# A model may ask whether it is traced. Results say that it did; the ops that eager runs say where.

_COPIES = frozenset({"detach", "alias", "clone", "copy", "_to_copy", "view", "expand"})
"""Copies and casts come and go where writing in place and autocast are taken apart."""


_INSIDE = {"linear": ("t", "mm", "addmm", "_unsafe_view")}
"""What eager runs for what a plan may call as one."""


class _Op(NamedTuple):
    name: str
    numbers: tuple[Any, ...]
    line: str


class _Ran(OpWatcher):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ops.append(_op(func, args, source_of(sys._getframe(2))))  # beyond the watcher's own
        return func(*args, **kwargs)


def first_divergent_line(run: Callable[[], Any], graphs: Iterable[fx.GraphModule]) -> str:
    """The first ``file:line``, with its module, at which no graph has what `run` runs, or empty."""
    planned: list[_Op] = []
    modules: dict[str, str] = {}
    for gm in graphs:
        for node in gm.graph.nodes:
            place = node.meta.get("custom") or {}
            if node.op == "call_function" and not is_getitem(node) and place.get(SOURCE_KEY):
                target, args = drawn(node)
                found = _op(target, args, place[SOURCE_KEY])
                inside = [found._replace(name=name) for name in _INSIDE.get(found.name, ())]
                planned += [found, *inside]
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
    numbers = tuple(repr(x) for x in args if isinstance(x, (bool, int, float)))
    return _Op(plain_name(target), numbers, line)
