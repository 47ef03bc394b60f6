"""Which gradient is of which parameter, in a graph that does not say it."""

from __future__ import annotations

import math
from collections.abc import Collection

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph, Value


def parameter_gradients(graph: TrainingGraph, parameters: Collection[str]) -> dict[str, str]:
    """The gradient of each parameter that has one.

    Both stand in the order of the model's parameters. Those that are frozen have none.

    Parameters
    ----------
    parameters : names of those that an op reads.

    Raises
    ------
    SolverError : a gradient is of no parameter.
    """
    values, found = graph.value_by_name, dict[str, str]()
    waiting = [v for v in graph.values if v.name in parameters]
    for name in graph.outputs:
        gradient = values[name]
        if gradient.kind != "gradient" or not gradient.producer:
            continue
        at = next((i for i, one in enumerate(waiting) if _is_of(gradient, one)), None)
        if at is None:
            raise SolverError(
                f"gradient {name} of {graph.name} is of no parameter, and a whole step keeps those "
                "of parameters alone: give inputs that require no grad"
            )
        found[waiting[at].name] = name
        del waiting[: at + 1]
    return found


def elements(value: Value) -> int:
    """How many numbers a value holds."""
    return math.prod(value.shape)


def _is_of(gradient: Value, parameter: Value) -> bool:
    return gradient.dtype == parameter.dtype and elements(gradient) == elements(parameter)
