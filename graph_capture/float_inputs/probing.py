"""Numbers of Python's that each step may read anew: a temperature, a drop rate.

Ops take such numbers as constants. To find where they go, the model is traced twice more with other
values, as floats that remember what is computed from them. A constant that follows from a number by
a known rule in all three traces is an argument of the step; one that follows by none, or a trace of
other ops, is a reason to plan for each value instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np

from remat.graph_capture.float_inputs.arguments import Arguments, Probe
from remat.graph_capture.float_inputs.inputs import FloatInputs, FloatPlace
from remat.graph_capture.float_inputs.traced_float import Log, run, traced_by_math
from remat.graph_capture.python_state.watch import PythonState

PROBES = ((0.0070682, 0.00137), (0.0148291, 0.00211))
"""How much lower a number is in a further trace, as a part of it: the first one, and each next."""


@contextlib.contextmanager
def holding(places: Sequence[FloatPlace], values: Sequence[float]) -> Generator[None]:
    """Let places hold other values meanwhile."""
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
    """Where the numbers go, by two further traces; or why they cannot be inputs.

    Parameters
    ----------
    places : of the numbers. state : all that forward reads. base : the trace with their values.
    trace : traces the model as it then is.
    """
    others: list[Probe] = []
    for first, more in PROBES:
        log = Log()
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
    own = run(log.steps, [place.value for place in places])
    for i, answer in answers:
        if own[i] != answer:
            return f"forward asks for {log.steps[i].name} of it, at a border"
    results = [own, *(other.log.values for other in others)]
    found = Arguments(log.steps, results)
    if why := found.read([base, *others]):
        return why
    arguments = tuple(found.arguments)
    taken = tuple(one.rule(own[one.step]) for one in arguments)
    return FloatInputs(tuple(places), tuple(log.steps), tuple(answers), arguments, taken, found.at)


def _unfollowed(state: PythonState, others: Sequence[Probe]) -> str:
    """Why what is computed from the numbers is not known; empty if it is."""
    for place in state.places:
        if _reads_past_methods(place.value):
            return f"{place.text} may read it, which cannot be followed"
    one, other = (probe.log for probe in others)
    if one.lost or other.lost:
        return one.lost or other.lost
    if one.steps != other.steps:
        return "forward computes something else for another value"
    asked = [i for i, step in enumerate(one.steps) if step.is_asked]
    if any(one.values[i] != other.values[i] for i in asked):
        return "forward takes another way for a value nearby"
    return ""


def _reads_past_methods(value: Any) -> bool:
    """Whether it may read a float without calling a method of it, and is not watched."""
    if isinstance(value, ModuleType):
        return value is np
    home = str(getattr(value, "__module__", "")).partition(".")[0]
    is_function = isinstance(value, (BuiltinFunctionType, np.ufunc)) or callable(value)
    return is_function and home in ("math", "cmath", "numpy")
