"""Which numbers a step reads, and what it makes of them."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from remat.graph_capture.errors import FloatInputError
from remat.graph_capture.joint.exact_ops import scale_of_eager
from remat.graph_capture.joint.nodes import bits_of
from remat.graph_capture.python_state.state_guards import PythonState
from remat.graph_capture.python_state.state_slots import ClosureCell, DictItem, SlotAttr
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.traced_float import FloatStep, Log, run_float_steps, traced_by_math

FloatPlace = DictItem | ClosureCell | SlotAttr
_SHOWN = 8  # names that an error shows
_SPECIAL = (0.0, 1.0)  # torch may leave out ops at these: only the trace's are taken


@dataclass(frozen=True)
class _Argument:
    step: int  # of the program
    rule: Callable[[float], float]  # from its result to the number that ops take


class FloatArgument(float):
    """A constant of the joint graph that each step computes anew: the argument of that index."""

    index: int


@dataclass(frozen=True)
class FloatInputs:
    places: tuple[FloatPlace, ...]  # where they are, with their values in the trace
    steps: tuple[FloatStep, ...]  # the program, which starts with them
    answers: tuple[tuple[int, Any], ...]  # what steps must give, by index
    arguments: tuple[_Argument, ...]  # what ops take
    own: tuple[float, ...]  # the arguments in the trace
    at: dict[tuple[str, int], int]  # an argument's index, by node and leaf of its arguments

    def given(self, values: Sequence[float]) -> list[float] | str:
        """The arguments for some values of the inputs; or why the trace does not hold for them."""
        try:
            found = run_float_steps(self.steps, values)
            given = [one.rule(found[one.step]) for one in self.arguments]
        except (ArithmeticError, ValueError) as error:
            return str(error)
        for index, answer in self.answers:
            if found[index] != answer:  # code branched on it while it was traced
                return f"{self.steps[index].name} of it is {found[index]} instead of {answer}"
        before = [*(place.value for place in self.places), *self.own]
        for now, was in zip([*values, *given], before, strict=True):
            # Where torch leaves out an op for 0 or 1, the trace has none to give the number to.
            if not math.isfinite(now) or (now in _SPECIAL and now != was):
                return "torch may run other ops for it"
        return given

    def mark(self, gm: fx.GraphModule) -> None:
        by_name: dict[str, list[tuple[int, int]]] = {}
        for (name, leaf), index in self.at.items():
            by_name.setdefault(name, []).append((leaf, index))
        for node in [node for node in gm.graph.nodes if node.name in by_name]:
            leaves, spec = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
            for leaf, index in by_name.pop(node.name):
                leaves[leaf] = argument = FloatArgument(leaves[leaf])
                argument.index = index
            node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)
        assert not by_name, "a node that takes a number is not in the graph"


def named_places(state: PythonState, names: Sequence[str]) -> list[FloatPlace]:
    """The places of these names, as refusals print them. Raises FloatInputError."""
    known = {place.text: place for place in state.places if isinstance(place, FloatPlace)}
    unfit = {name: why for name in names if (why := _why_unfit(known.get(name)))}
    if not unfit:
        return [known[name] for name in names]
    floats = sorted(text for text, place in known.items() if not _why_unfit(place))
    name, why = next(iter(unfit.items()))
    error = FloatInputError(
        f"float_inputs names {name!r}, which {why}. Numbers that can be inputs: "
        f"{', '.join(floats[:_SHOWN]) or 'none'}"
    )
    error.unfit = tuple(unfit)
    raise error


def _why_unfit(place: FloatPlace | None) -> str:
    if place is None:
        return "forward does not read"
    value = place.value
    if type(value) is not float:
        return f"holds {value!r}, which is not a float"
    if value == 0 or not math.isfinite(value):
        return f"is {value!r} now, and torch may run other ops for another value"
    return ""


# Constants of joint graphs that follow from a number by a known rule.

_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_RULES: tuple[Callable[[float], float], ...] = (
    lambda x: x, lambda x: -x, lambda x: 1 - x, lambda x: 1.0 / (1.0 - x), lambda x: 1.0 / x,
    lambda x: x - 1, lambda x: x * x,
    *(functools.partial(scale_of_eager, dtype=dtype) for dtype in _PRECISIONS),
)  # fmt: skip
"""What torch itself computes of a number before it becomes an op's argument."""


@dataclass(frozen=True)
class Probe:
    gm: fx.GraphModule
    left: Any
    looked_at: bytes  # a digest of what tensors held that code has looked at
    log: Log


class _Arguments:
    def __init__(self, steps: Sequence[FloatStep], results: Sequence[Sequence[Any]]) -> None:
        self.arguments: list[_Argument] = []
        self.at: dict[tuple[str, int], int] = {}
        self._known: dict[tuple[str, ...], int] = {}
        self._numbers = [i for i, step in enumerate(steps) if not step.is_asked]
        self._results = results

    def read(self, probes: Sequence[Probe]) -> str:
        """Compare the traces node by node; why they are not alike, or empty."""
        graphs = [list(probe.gm.graph.nodes) for probe in probes]
        if any(len(graph) != len(graphs[0]) for graph in graphs):
            return "torch runs other ops for a nearby value"
        for nodes in zip(*graphs, strict=True):
            if why := self._read_node(nodes, [probe.gm for probe in probes]):
                return why
        if any(not _are_equal(probe.left, probes[0].left) for probe in probes):
            return "a result or an attribute that forward sets depends on it"
        # What code does with a tensor's values is not followed as a float's way is.
        if any(probe.looked_at != probes[0].looked_at for probe in probes):
            return "forward looks at the values of a tensor made from it"
        return ""

    def _read_node(self, nodes: Sequence[fx.Node], gms: Sequence[fx.GraphModule]) -> str:
        first = nodes[0]
        flat = [pytree.tree_flatten((tuple(n.args), dict(n.kwargs))) for n in nodes]
        same = all((n.op, n.target, n.name) == (first.op, first.target, first.name) for n in nodes)
        if not same or any(spec != flat[0][1] for _, spec in flat):
            return "torch runs other ops for a nearby value"
        if first.op == "get_attr":
            held = [getattr(gm, str(first.target)) for gm in gms]
            is_equal = all(_are_equal(one, held[0]) for one in held)
            return "" if is_equal else "a constant tensor depends on it"
        for i, leaves in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            # Nodes by their names, all else by its text.
            told = {(type(x), x.name if isinstance(x, fx.Node) else repr(x)) for x in leaves}
            if len(told) == 1:
                continue
            index = self._argument(leaves) if all(type(x) is float for x in leaves) else None
            if index is None or first.op == "output":
                return f"{first.target} takes {leaves[0]!r}, which follows from it by no known rule"
            self.at[first.name, i] = index
        return ""

    def _argument(self, constants: Sequence[float]) -> int | None:
        key = tuple(map(repr, constants))  # one argument serves every op that takes the same number
        if key not in self._known and (found := self._rule(constants)) is not None:
            self._known[key] = len(self.arguments)
            self.arguments.append(found)
        return self._known.get(key)

    def _rule(self, constants: Sequence[float]) -> _Argument | None:
        for step in self._numbers:
            values = [results[step] for results in self._results]
            # All three traces must agree, or a rule could fit by chance.
            for rule in (*_RULES, *_scaled(values[0], constants[0])):
                if _fits(rule, values, constants):
                    return _Argument(step, rule)
        return None


def _scaled(value: float, constant: float) -> Iterator[Callable[[float], float]]:
    """Rules that multiply or divide by a whole number, such as a number of classes."""
    for big, small in ((value, constant), (constant, value)):
        whole = round(big / small) if small and math.isfinite(big / small) else 0
        if abs(whole) > 1:
            scale = operator.truediv if big is value else operator.mul
            yield lambda x, scale=scale, whole=whole: scale(x, whole)


def _fits(rule: Callable[[float], float], values: Sequence[float], found: Sequence[float]) -> bool:
    try:
        # By their text, which tells -0.0 from 0.0 and takes NaN for NaN.
        return all(repr(rule(x)) == repr(y) for x, y in zip(values, found, strict=True))
    except (ArithmeticError, ValueError):
        return False


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two constants, or trees of them, are the same; tensors by their bits."""
    if one is other:
        return True
    if isinstance(other, fx.GraphModule):
        return one.code == other.code
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return is_alike and torch.equal(bits_of(one), bits_of(other))
    # Each trace has its own stand-in for an object that is no tensor, such as a group of ranks.
    if (stood_for := getattr(one, "real_obj", None)) is not None:
        return stood_for is getattr(other, "real_obj", None)
    return type(one) is type(other) and repr(one) == repr(other)


# Numbers of Python's that each step may read anew: a temperature, a drop rate. To find where they
# go, the model is traced twice more with other values, as floats that remember what is computed. A
# constant that follows by a known rule in all three traces is an argument of the step; else there
# is a plan for each value.

_PROBES = ((0.0070682, 0.00137), (0.0148291, 0.00211))  # lower by these parts: first, and each next


@contextlib.contextmanager
def holding(places: Sequence[FloatPlace], values: Sequence[float]) -> Generator[None]:
    kept = [place.now() for place in places]
    try:
        for place, value in zip(places, values, strict=True):
            place.put(value)
        yield
    finally:
        for place, value in zip(places, kept, strict=True):
            place.put(value)


def probed(
    places: Sequence[FloatPlace], state: PythonState, base: Probe, trace: Callable[[Log], Probe]
) -> FloatInputs | str:
    """By two further traces; or why they cannot be inputs. `base`: with their own values."""
    others: list[Probe] = []
    for first, more in _PROBES:
        log = Log()
        # Each by a part of its own, so that equal numbers are told apart.
        values = [place.value * (1 - first - more * i) for i, place in enumerate(places)]
        traced = [log.input(place.text, v) for place, v in zip(places, values, strict=True)]
        with holding(places, traced), traced_by_math():
            others.append(trace(log))
    return _matched(places, state, base, others)


def _matched(
    places: Sequence[FloatPlace], state: PythonState, base: Probe, others: Sequence[Probe]
) -> FloatInputs | str:
    if why := _unfollowed(state, others):
        return why
    log = others[0].log
    answers = [(i, log.values[i]) for i, step in enumerate(log.steps) if step.is_asked]
    # The base trace had plain floats, so its results are computed from the program.
    own = run_float_steps(log.steps, [place.value for place in places])
    for i, answer in answers:
        if own[i] != answer:
            return f"forward asks for {log.steps[i].name} of it, at a border"
    results = [own, *(other.log.values for other in others)]
    found = _Arguments(log.steps, results)
    if why := found.read([base, *others]):
        return why
    arguments = tuple(found.arguments)
    taken = tuple(one.rule(own[one.step]) for one in arguments)
    return FloatInputs(tuple(places), tuple(log.steps), tuple(answers), arguments, taken, found.at)


def _unfollowed(state: PythonState, others: Sequence[Probe]) -> str:
    for place in state.places:
        if _reads_past_methods(place.value):
            return f"{place.text} may read it in a way that cannot be followed"
    one, other = (probe.log for probe in others)
    if lost := one.lost or other.lost:
        return lost
    if one.steps != other.steps:
        return "forward computes something else for another value"
    asked = [i for i, step in enumerate(one.steps) if step.is_asked]
    if any(one.values[i] != other.values[i] for i in asked):
        return "forward takes another path for a nearby value"
    return ""


def _reads_past_methods(value: Any) -> bool:
    if isinstance(value, ModuleType):  # C reads past a float's methods: `math`'s are watched
        return value is np
    home = str(getattr(value, "__module__", "")).partition(".")[0]
    is_function = isinstance(value, (BuiltinFunctionType, np.ufunc)) or callable(value)
    return is_function and home in ("math", "cmath", "numpy")
