"""Floats that remember how they were computed, and what was asked of them, while a step is traced.

Arithmetic is a program of a few steps; a question, as ``if self.p > 0``, is a step with the answer
under which the trace holds. A number that leaves, as into a text, is lost sight of.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class _Ref:
    index: int


@dataclass(frozen=True)
class FloatStep:
    name: str
    operands: tuple[_Ref | int | float, ...]
    function: Callable[..., Any] = field(compare=False)
    is_asked: bool = False  # its result must be what it was in the trace


@dataclass
class Log:
    """What happened to the inputs in one trace: a program that computes all of it again."""

    steps: list[FloatStep] = field(default_factory=list[FloatStep])
    values: list[Any] = field(default_factory=list[Any])  # of each step; first the inputs
    lost: str = ""  # where a number went out of sight; empty if none did
    _known: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def input(self, name: str, value: float) -> _TracedFloat:
        return self.note(FloatStep(name, (), float), value)

    def note(self, step: FloatStep, value: Any) -> Any:
        """Keep a step and its result, once; a float comes back as one that is followed."""
        # Constants by their text: 1, 1.0 and True are three, and NaN is NaN.
        key = (step.name, *(one if isinstance(one, _Ref) else repr(one) for one in step.operands))
        index = self._known.setdefault(key, len(self.steps))
        if index == len(self.steps):
            self.steps.append(step)
            self.values.append(value)
        return value if step.is_asked else _TracedFloat(value, _Ref(index), self)

    def lose(self, why: str) -> None:
        self.lost = self.lost or why


def run_float_steps(steps: Sequence[FloatStep], inputs: Sequence[float]) -> list[Any]:
    """The results of all steps of a program, whose first ones are the inputs."""
    found: list[Any] = list(inputs)
    for step in steps[len(inputs) :]:
        given = (found[o.index] if isinstance(o, _Ref) else o for o in step.operands)
        found.append(step.function(*given))
    return found


class _TracedFloat(float):
    """A float with its place in a program. Arithmetic on it adds steps."""

    ref: _Ref
    log: Log

    def __new__(cls, value: float, ref: _Ref, log: Log) -> _TracedFloat:
        made = super().__new__(cls, value)
        made.ref, made.log = ref, log
        return made

    def __deepcopy__(self, memo: Any) -> _TracedFloat:
        return self  # copied with what holds it, it is still the user's number


def _applied(name: str, function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of numbers, some of which are traced; `NotImplemented` for what is no number."""
    if not all(isinstance(operand, (int, float)) for operand in operands):
        return NotImplemented
    log = next(one.log for one in operands if isinstance(one, _TracedFloat))
    # Of plain floats, so that nothing is noted twice.
    plain = (float.__float__(x) if isinstance(x, _TracedFloat) else x for x in operands)
    value = function(*plain)
    taken = tuple(one.ref if isinstance(one, _TracedFloat) else one for one in operands)
    # A result that is no float, as of `<`, is followed no further, so it must stay as it was.
    return log.note(FloatStep(name, taken, function, is_asked=type(value) is not float), value)


_TWO = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
}  # fmt: skip
_ASKED = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_ONE = {
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "bool": bool, "int": int,
    "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
_LOST = (
    "__float__", "__hash__", "__format__", "__str__", "__repr__", "__reduce__", "__divmod__",
    "__rdivmod__", "is_integer", "as_integer_ratio", "hex", "conjugate",
)  # fmt: skip


def _operation(
    name: str, function: Callable[..., Any], *, is_reflected: bool = False
) -> Callable[..., Any]:
    if is_reflected:
        return lambda self, other: _applied(name, function, other, self)
    return lambda self, *others: _applied(name, function, self, *others)


def _asked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    own = getattr(float, f"__{name}__")

    def ask(self: _TracedFloat, other: Any) -> Any:
        is_number = isinstance(other, (int, float))
        # A comparison with what is no number says the same for any value.
        return _applied(name, function, self, other) if is_number else own(self, other)

    return ask


def _losing(name: str) -> Callable[..., Any]:
    own = getattr(float, name)

    def lose(self: _TracedFloat, *others: Any) -> Any:
        self.log.lose(f"it is read by {name}")
        return own(self, *others)

    return lose


for _name, _function in _TWO.items():
    setattr(_TracedFloat, f"__{_name}__", _operation(_name, _function))
    setattr(_TracedFloat, f"__r{_name}__", _operation(_name, _function, is_reflected=True))
for _name, _function in _ASKED.items():
    setattr(_TracedFloat, f"__{_name}__", _asked(_name, _function))
for _name, _function in _ONE.items():
    setattr(_TracedFloat, f"__{_name}__", _operation(_name, _function))
for _name in _LOST:
    setattr(_TracedFloat, _name, _losing(_name))
_TracedFloat.__round__ = _operation("round", round)


@contextlib.contextmanager
def traced_by_math() -> Generator[None]:
    """Let the functions of `math` follow such floats meanwhile."""
    # In C, they read a float's value past all of its methods.
    own = {name: value for name, value in vars(math).items() if callable(value)}
    with contextlib.ExitStack() as stack:
        for name, function in own.items():
            if name not in ("floor", "ceil", "trunc"):  # these ask the number
                stack.enter_context(patch.object(math, name, _following(name, function)))
        yield


def _following(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def follow(*operands: Any, **words: Any) -> Any:
        inside = [one for value in (*operands, *words.values()) for one in _inside(value)]
        if not inside:
            return function(*operands, **words)
        found = NotImplemented if words else _applied(f"math.{name}", function, *operands)
        if found is NotImplemented:
            inside[0].log.lose(f"it is read by math.{name}")
            return function(*operands, **words)
        return found

    return follow


def _inside(value: Any) -> list[_TracedFloat]:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [one for one in items if isinstance(one, _TracedFloat)]
