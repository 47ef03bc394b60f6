"""Numbers that each step reads anew, as nodes of the two graphs.

Forward reads them from a list that is made before the step. Backward must have those of its own
forward, whatever the user has set since: forward saves them for it, in a small tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from remat.graph_capture.float_inputs.inputs import FloatArgument, FloatInputs


class FloatSource:
    """Reads the numbers of one plan, before each step.

    Attributes
    ----------
    inputs : where they are. arguments : what ops take in the next step.
    """

    def __init__(self, inputs: FloatInputs) -> None:
        self.inputs = inputs
        self.arguments: list[float] = list(inputs.own)
        self._values = [place.value for place in inputs.places]

    def refresh(self) -> str:
        """Read the numbers as they are now; why the plan does not hold for them, or empty."""
        values = [place.now() for place in self.inputs.places]
        if all(now is before for now, before in zip(values, self._values, strict=True)):
            return ""
        for place, now in zip(self.inputs.places, values, strict=True):
            if type(now) is not float:
                return f"{place.text} was {place.value!r} when the step was captured and is {now!r}"
        given = self.inputs.given(values)
        if isinstance(given, str):
            pairs = zip(self.inputs.places, values, strict=True)
            shown = ", ".join(f"{place.text} = {now!r}" for place, now in pairs)
            return f"the step was not captured for {shown}: {given}"
        self._values, self.arguments = values, given
        return ""

    def numbers(self) -> list[float]:
        """What ops take, for a graph that no other follows."""
        return self.arguments

    def saved(self) -> Tensor:
        """What ops take, as a tensor to be saved for backward."""
        return torch.tensor(self.arguments, dtype=torch.float64)


def read_floats(forward: fx.Graph, backward: fx.Graph, source: FloatSource, results: int) -> None:
    """Let nodes with a `FloatArgument` read it from `source`.

    Parameters
    ----------
    results : how many of forward's outputs are its own; the others are saved for backward.
    """
    if not _takes_floats(backward):
        _replace(forward, source.numbers, ())
        return
    with _after_inputs(forward):
        saved = forward.call_function(source.saved)
    saved.meta["val"] = _fake(forward, source)
    returned = list(_results(forward))
    forward.output_node().args = ((*returned[:results], saved, *returned[results:]),)
    with backward.inserting_before(next(iter(backward.nodes))):
        given = backward.placeholder("float_inputs")
    given.meta = dict(saved.meta)
    _replace(forward, Tensor.tolist, (saved,))
    _replace(backward, Tensor.tolist, (given,))


def _results(graph: fx.Graph) -> tuple[Any, ...]:
    returned = graph.output_node().args[0]
    assert isinstance(returned, tuple)
    return returned


def _after_inputs(graph: fx.Graph) -> Any:
    return graph.inserting_after(graph.find_nodes(op="placeholder")[-1])


def _takes_floats(graph: fx.Graph) -> bool:
    return any(
        isinstance(leaf, FloatArgument) for node in graph.nodes for leaf in _arguments_of(node)
    )


def _arguments_of(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((tuple(node.args), dict(node.kwargs)))


def _replace(graph: fx.Graph, listed: Callable[..., Any], taken: tuple[fx.Node, ...]) -> None:
    """Put a node in the place of each number: an item of the list that `listed` makes."""
    if not _takes_floats(graph):
        return
    with graph.inserting_after(taken[0]) if taken else _after_inputs(graph):
        numbers = graph.call_function(listed, taken)
    made: dict[int, fx.Node] = {}

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, FloatArgument):
            return leaf
        if leaf.index not in made:
            with graph.inserting_after(numbers):
                made[leaf.index] = graph.call_function(operator.getitem, (numbers, leaf.index))
            made[leaf.index].meta["val"] = float(leaf)
        return made[leaf.index]

    for node in list(graph.nodes):
        if any(isinstance(leaf, FloatArgument) for leaf in _arguments_of(node)):
            node.args, node.kwargs = pytree.tree_map(read, (tuple(node.args), dict(node.kwargs)))


def _fake(graph: fx.Graph, source: FloatSource) -> Tensor:
    """The saved tensor, as AOTAutograd wants what a step saves to be described."""
    fakes = (node.meta.get("val") for node in graph.nodes)
    mode: Any = next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode"))
    with mode:
        return torch.empty(len(source.arguments), dtype=torch.float64)
