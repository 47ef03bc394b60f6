"""Numbers that each step reads anew, as nodes of the two graphs.

Forward reads them from a list that is made before the step. Backward must have those of its own
forward, whatever the user has set since: forward saves them for it, in a small tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.float_inputs.inputs import FloatArgument, FloatInputs
from remat.graph_capture.sizes.expressions import FloatOfSizes, SizeArgument
from remat.graph_capture.sizes.trace_over_sizes import SYMBOLIC, Environment
from remat.graph_capture.torch_private.core import pytree


class FloatSource:
    """Reads the numbers of one plan; `arguments` are what ops take in the next step."""

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
        return self.arguments

    def saved(self) -> Tensor:
        return torch.tensor(self.arguments, dtype=torch.float64)  # as Python's floats


def read_floats(forward: fx.Graph, backward: fx.Graph, source: FloatSource, results: int) -> None:
    if not _takes_floats(backward):
        # Backward takes none of them, so forward need not save any.
        _replace(forward, source.numbers, ())
        return
    with _after_inputs(forward):
        saved = forward.call_function(source.saved)
    saved.meta["val"] = _fake(forward, source)  # AOTAutograd wants what is saved described
    returned = list(_results(forward))
    # AOTAutograd takes what comes after the results as saved.
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
    fakes = (node.meta.get("val") for node in graph.nodes)
    mode: Any = next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode"))
    with mode:
        return torch.empty(len(source.arguments), dtype=torch.float64)


# Numbers that follow from the sizes of a batch: forward reads the sizes from the shapes of its
# inputs, and computes at its start what ops take. Backward gets those of its own forward.


_Numbers = Callable[..., tuple[Any, ...]]


def read_sizes(forward: fx.Graph, backward: fx.Graph, env: Environment) -> None:
    in_backward = _arguments_in(backward)
    if not in_backward and not _arguments_in(forward):
        return
    sizes = _sizes_of_inputs(forward, env)
    if in_backward:
        given: Any = forward.output_node().args[0]
        # AOTAutograd hands over symbolic integers so: forward returns them last, backward takes
        # them first.
        forward.output_node().args = ((*given, *sizes),)
        _compute(backward, _taken_first(backward, sizes), env)
    _compute(forward, sizes, env)


def _sizes_of_inputs(forward: fx.Graph, env: Environment) -> list[fx.Node]:
    inputs = forward.find_nodes(op="placeholder")
    nodes: list[fx.Node] = []
    with forward.inserting_after(inputs[-1]):
        for name, size in reversed(env.size.items()):  # each goes right after the inputs
            found = _first_with(inputs, size)
            if found is None:
                raise RewriteError(f"no input of the step has the size {name} any more")
            node = forward.call_function(torch.ops.aten.sym_size.int, found, name=name)
            node.meta["val"] = size
            nodes.insert(0, node)
    return nodes


def _first_with(inputs: Sequence[fx.Node], size: Any) -> tuple[fx.Node, int] | None:
    for node in inputs:
        traced = node.meta.get(SYMBOLIC)
        for dim, one in enumerate(traced.shape if isinstance(traced, Tensor) else ()):
            if isinstance(one, torch.SymInt) and one.node.expr == size.node.expr:
                return node, dim
    return None


def _taken_first(backward: fx.Graph, sizes: Sequence[fx.Node]) -> list[fx.Node]:
    taken: list[fx.Node] = []
    with backward.inserting_before(next(iter(backward.nodes))):
        for size in sizes:
            node = backward.placeholder(size.name)
            node.meta["val"] = size.meta["val"]
            taken.append(node)
    return taken


def _arguments_in(graph: fx.Graph) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in graph.nodes:
        found |= {_name_of(leaf): leaf for leaf in _numbers_of(node)}
    return found


def _numbers_of(node: fx.Node) -> list[SizeArgument | FloatOfSizes]:
    leaves = pytree.tree_leaves((tuple(node.args), dict(node.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, (SizeArgument, FloatOfSizes))]


def _name_of(leaf: SizeArgument | FloatOfSizes) -> str:
    if isinstance(leaf, SizeArgument):
        return leaf.text
    functions = ", ".join(f"{name}={function}" for name, function in leaf.bound.items())
    return f"{leaf.text} with {functions}"


def _compute(graph: fx.Graph, sizes: Sequence[fx.Node], env: Environment) -> None:
    found = _arguments_in(graph)
    if not found:
        return
    made = {size.name: size for size in sizes if size.name in found}
    others = {key: leaf for key, leaf in found.items() if key not in made}
    # After all inputs: what is not an input comes after them in a graph.
    last = [*graph.find_nodes(op="placeholder"), *(s for s in sizes if s.op != "placeholder")][-1]
    if others:
        with graph.inserting_after(last):
            numbers = graph.call_function(
                _program(list(others.values()), list(env.size)), (*sizes,)
            )
        at = numbers
        for i, (key, leaf) in enumerate(others.items()):
            with graph.inserting_after(at):
                at = made[key] = graph.call_function(operator.getitem, (numbers, i))
            at.meta["val"] = float(leaf) if isinstance(leaf, float) else int(leaf)

    def read(leaf: Any) -> Any:
        return made[_name_of(leaf)] if isinstance(leaf, (SizeArgument, FloatOfSizes)) else leaf

    for node in list(graph.nodes):
        if _numbers_of(node):
            node.args, node.kwargs = pytree.tree_map(read, (tuple(node.args), dict(node.kwargs)))


def _program(leaves: Sequence[Any], names: Sequence[str]) -> _Numbers:
    space: dict[str, Any] = {}
    texts: list[str] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, FloatOfSizes):
            # A function of its own: the names that it binds are not those of another.
            own = dict(leaf.bound)
            exec(f"def number({', '.join(names)}):\n    return {leaf.text}\n", own)
            space[f"_number{i}"] = own["number"]
            texts.append(f"_number{i}({', '.join(names)})")
        else:
            texts.append(leaf.text)
    source = f"def from_sizes({', '.join(names)}):\n    return ({', '.join(texts)},)\n"
    exec(compile(source, "<remat sizes>", "exec"), space)
    made = space["from_sizes"]
    # exec leaves none, and fx names a function by its module.
    made.__module__ = __name__
    return made
