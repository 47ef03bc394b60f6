"""Which numbers a step reads, and what it makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import fx

from remat.graph_capture.errors import FloatInputError
from remat.graph_capture.float_inputs.traced_float import Step, run
from remat.graph_capture.python_state.places import Cell, Entry, Slot
from remat.graph_capture.python_state.watch import PythonState

FloatPlace = Entry | Cell | Slot
SHOWN = 8
"""Names that an error shows."""
SPECIAL = (0.0, 1.0)
"""Values for which torch may leave out ops, as dropout's. Only those of the trace are taken."""


@dataclass(frozen=True)
class Argument:
    """A number that ops take: a rule, applied to a step of the program."""

    step: int
    rule: Callable[[float], float]


class FloatArgument(float):
    """A constant of the joint graph that each step computes anew: the argument of that index."""

    index: int


@dataclass(frozen=True)
class FloatInputs:
    """Which numbers a step reads, and what it makes of them.

    Attributes
    ----------
    places : where they are, with their values in the trace. steps : the program, which starts with
        them. answers : what steps must give, by index. arguments : what ops take.
    own : the arguments in the trace.
    at : the argument's index, by the name of a node and the index of a leaf of its arguments.
    """

    places: tuple[FloatPlace, ...]
    steps: tuple[Step, ...]
    answers: tuple[tuple[int, Any], ...]
    arguments: tuple[Argument, ...]
    own: tuple[float, ...]
    at: dict[tuple[str, int], int]

    def given(self, values: Sequence[float]) -> list[float] | str:
        """The arguments for some values of the inputs; or why the trace does not hold for them."""
        try:
            found = run(self.steps, values)
            given = [one.rule(found[one.step]) for one in self.arguments]
        except (ArithmeticError, ValueError) as error:
            return str(error)
        for index, answer in self.answers:
            if found[index] != answer:
                return f"{self.steps[index].name} of it is {found[index]} instead of {answer}"
        before = [*(place.value for place in self.places), *self.own]
        for now, was in zip([*values, *given], before, strict=True):
            if not math.isfinite(now) or (now in SPECIAL and now != was):
                return "torch may run other ops for it"
        return given

    def mark(self, gm: fx.GraphModule) -> None:
        """Put a `FloatArgument` in each place of the joint graph that takes one."""
        by_name: dict[str, list[tuple[int, int]]] = {name: [] for name, _ in self.at}
        for (name, leaf), index in self.at.items():
            by_name[name].append((leaf, index))
        for node in [node for node in gm.graph.nodes if node.name in by_name]:
            leaves, spec = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
            for leaf, index in by_name.pop(node.name):
                leaves[leaf] = argument = FloatArgument(leaves[leaf])
                argument.index = index
            node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)
        assert not by_name, "a node that takes a number is not in the graph"


def named_places(state: PythonState, names: Sequence[str]) -> list[FloatPlace]:
    """The places of these names, as refusals print them.

    Raises
    ------
    FloatInputError : there is none of that name, or it holds no float now, or one for which torch
        may leave out ops.
    """
    known = {place.text: place for place in state.places if isinstance(place, FloatPlace)}
    unfit = {name: why for name in names if (why := _why_unfit(known.get(name)))}
    if not unfit:
        return [known[name] for name in names]
    floats = sorted(text for text, place in known.items() if not _why_unfit(place))
    name, why = next(iter(unfit.items()))
    error = FloatInputError(
        f"float_inputs names {name!r}, which {why}. Numbers that can be inputs here: "
        f"{', '.join(floats[:SHOWN]) or 'none'}"
    )
    error.unfit = tuple(unfit)
    raise error


def _why_unfit(place: FloatPlace | None) -> str:
    if place is None:
        return "forward does not read"
    value = place.value
    if type(value) is not float:
        return f"holds {value!r} and no float"
    if value == 0 or not math.isfinite(value):
        return f"is {value!r} now, and torch may run other ops for another value"
    return ""
