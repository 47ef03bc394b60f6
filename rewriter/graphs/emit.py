"""Schedule → two fx graphs of eager's ops, which carry it out step by step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from remat.graph_capture.distributed.dtensors import is_beside_local_part
from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import is_tangent
from remat.graph_capture.sizes.symbols import FloatOfSizes, SizeArgument
from remat.graph_capture.sizes.trace_over_sizes import SYMBOLIC, Environment
from remat.graph_capture.torch_private.aot import ViewAndMutationMeta
from remat.graph_capture.torch_private.core import pytree
from remat.rewriter.graphs.copies import CopyContext, CopyEmitter, copy_times, written_by
from remat.rewriter.graphs.eager import EagerEmitter, take_as_they_come
from remat.rewriter.graphs.emitter import Demand, as_module, emit_both
from remat.rewriter.graphs.views import join_linears, leave_out_views
from remat.rewriter.tiers.file_tier import TierCopies
from remat.schedules.kept_in_forward import end_of_forward
from remat.schedules.schedule import Compute, Schedule

if TYPE_CHECKING:
    from remat.graph_capture.tracing.float_inputs import FloatInputs

# Numbers read anew at each step are nodes. Forward reads them from a list made before the step, and
# saves them in a small tensor: backward must have those of its own forward.


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


def _read_floats(forward: fx.Graph, backward: fx.Graph, source: FloatSource, results: int) -> None:
    from remat.graph_capture.tracing.float_inputs import FloatArgument

    if not _leaves_in(backward, FloatArgument):
        _list_floats(forward, source.numbers, ())  # so forward saves none for backward
        return
    with _after_inputs(forward):
        saved = forward.call_function(source.saved)
    saved.meta["val"] = _fake(forward, source)  # AOTAutograd wants what is saved described
    returned: Any = forward.output_node().args[0]
    # AOTAutograd takes what comes after the results as saved.
    forward.output_node().args = ((*returned[:results], saved, *returned[results:]),)
    with backward.inserting_before(next(iter(backward.nodes))):
        given = backward.placeholder("float_inputs")
    given.meta = dict(saved.meta)
    _list_floats(forward, Tensor.tolist, (saved,))
    _list_floats(backward, Tensor.tolist, (given,))


def _after_inputs(graph: fx.Graph) -> Any:
    return graph.inserting_after(graph.find_nodes(op="placeholder")[-1])


def _leaves_in(graph: fx.Graph, kinds: Any) -> list[Any]:
    taken = [(tuple(node.args), dict(node.kwargs)) for node in graph.nodes]
    return [leaf for leaf in pytree.tree_leaves(taken) if isinstance(leaf, kinds)]


def _replace(graph: fx.Graph, kinds: Any, read: Callable[[Any], fx.Node]) -> None:
    for node in list(graph.nodes):
        taken = tuple(node.args), dict(node.kwargs)
        if any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(taken)):
            node.args, node.kwargs = pytree.tree_map_only(kinds, read, taken)


def _list_floats(graph: fx.Graph, listed: Callable[..., Any], taken: tuple[fx.Node, ...]) -> None:
    from remat.graph_capture.tracing.float_inputs import FloatArgument

    if not _leaves_in(graph, FloatArgument):
        return
    with graph.inserting_after(taken[0]) if taken else _after_inputs(graph):
        numbers = graph.call_function(listed, taken)
    made: dict[int, fx.Node] = {}

    def read(leaf: FloatArgument) -> fx.Node:
        if leaf.index not in made:
            with graph.inserting_after(numbers):
                made[leaf.index] = graph.call_function(operator.getitem, (numbers, leaf.index))
            made[leaf.index].meta["val"] = float(leaf)
        return made[leaf.index]

    _replace(graph, FloatArgument, read)


def _fake(graph: fx.Graph, source: FloatSource) -> Tensor:
    fakes = (node.meta.get("val") for node in graph.nodes)
    mode: Any = next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode"))
    with mode:
        return torch.empty(len(source.arguments), dtype=torch.float64)


# From a batch's sizes: forward computes them from its inputs, and saves them for its backward.

_OF_SIZES = (SizeArgument, FloatOfSizes)


def _read_sizes(forward: fx.Graph, backward: fx.Graph, env: Environment) -> None:
    if not (in_backward := _arguments_in(backward)) and not _arguments_in(forward):
        return
    sizes = _sizes_of_inputs(forward, env)
    if in_backward:
        given: Any = forward.output_node().args[0]
        forward.output_node().args = ((*given, *sizes),)  # AOTAutograd's order of symbols
        taken: list[fx.Node] = []
        with backward.inserting_before(next(iter(backward.nodes))):
            for size in sizes:
                node = backward.placeholder(size.name)
                node.meta["val"] = size.meta["val"]
                taken.append(node)
        _compute(backward, taken, env)
    _compute(forward, sizes, env)


def _sizes_of_inputs(forward: fx.Graph, env: Environment) -> list[fx.Node]:
    inputs = forward.find_nodes(op="placeholder")
    nodes: list[fx.Node] = []
    with forward.inserting_after(inputs[-1]):
        for name, size in reversed(env.size.items()):  # each goes right after the inputs
            if (found := _first_with(inputs, size)) is None:
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


def _arguments_in(graph: fx.Graph) -> dict[str, Any]:
    return {_name_of(leaf): leaf for leaf in _leaves_in(graph, _OF_SIZES)}


def _name_of(leaf: SizeArgument | FloatOfSizes) -> str:
    if isinstance(leaf, SizeArgument):
        return leaf.text
    functions = ", ".join(f"{name}={function}" for name, function in leaf.bound.items())
    return f"{leaf.text} with {functions}"


def _compute(graph: fx.Graph, sizes: Sequence[fx.Node], env: Environment) -> None:
    if not (found := _arguments_in(graph)):
        return
    made = {size.name: size for size in sizes if size.name in found}
    others = {key: leaf for key, leaf in found.items() if key not in made}
    # After all inputs: what is not an input comes after them in a graph.
    last = [*graph.find_nodes(op="placeholder"), *(s for s in sizes if s.op != "placeholder")][-1]
    if others:
        with graph.inserting_after(last):
            program = _program(list(others.values()), list(env.size))
            at = numbers = graph.call_function(program, (*sizes,))
        for i, (key, leaf) in enumerate(others.items()):
            with graph.inserting_after(at):
                at = made[key] = graph.call_function(operator.getitem, (numbers, i))
            at.meta["val"] = float(leaf) if isinstance(leaf, float) else int(leaf)
    _replace(graph, _OF_SIZES, lambda leaf: made[_name_of(leaf)])


def _program(leaves: Sequence[Any], names: Sequence[str]) -> Any:
    space: dict[str, Any] = {}
    texts: list[str] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, FloatOfSizes):
            own = dict(leaf.bound)  # its names are not those of others
            exec(f"def number({', '.join(names)}):\n    return {leaf.text}\n", own)
            space[f"_number{i}"] = own["number"]
            texts.append(f"_number{i}({', '.join(names)})")
        else:
            texts.append(leaf.text)
    source = f"def from_sizes({', '.join(names)}):\n    return ({', '.join(texts)},)\n"
    exec(compile(source, "<remat sizes>", "exec"), space)
    made = space["from_sizes"]
    made.__module__ = __name__  # exec leaves none, and fx names a function by its module
    return made


def emit(
    joint: Joint, schedule: Schedule, floats: FloatSource | None = None,
    metadata: ViewAndMutationMeta | None = None, *, writes: bool = True,
    env: Environment | None = None, tier: TierCopies | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
    """Forward and backward GraphModules that carry out `schedule`, in AOTAutograd's contract.

    `metadata`: backward takes gradients in the strides that they come in. `writes`: write in place
    as eager does. `env`: of a trace for a range of sizes. `tier`: where values are copied to.
    """
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again: set[str] = set()  # of both graphs: what runs in backward may have run in forward
    moving: CopyContext | None = None
    if tier is not None:
        moving = CopyContext(tier, copy_times(schedule, lambda op: written_by(joint, op)))

    def start(demand: Demand, left_live: frozenset[str]) -> EagerEmitter:
        given = joint, demand, again, repeated, left_live, writes
        return CopyEmitter(moving, *given) if moving else EagerEmitter(*given)

    graphs = emit_both(joint, schedule, joint.num_forward_outputs, start)
    if metadata is not None:
        take_as_they_come(metadata, graphs[1])
    forward, backward = graphs
    leave_out_views(forward, joint.num_forward_outputs)
    leave_out_views(backward)
    if writes:  # Inductor takes linears apart
        join_linears(forward, backward, joint.num_forward_outputs)
    if floats:
        _read_floats(forward, backward, floats, joint.num_forward_outputs)
    if env:
        _read_sizes(forward, backward, env)
    return as_module(joint, forward), as_module(joint, backward)


def recompute_inputs(joint: Joint, schedule: Schedule) -> tuple[int, ...]:
    # Eager has saved what was made of them, so it is blind to a change before backward: a batch
    # copied into an input buffer, a weight changed by `.data`.
    graph, end = joint.graph, end_of_forward(joint.graph, schedule)
    again = {step.op for step in schedule.steps[end:] if isinstance(step, Compute)}
    ops = [graph.ops[graph.op_index[name]] for name in again]
    values = {value for op in ops if op.phase == "forward" for value in op.inputs}
    read = {joint.base_of_value.get(value) for value in values}
    given = joint.module.graph.find_nodes(op="placeholder")  # a DTensor's local part stands for it
    inputs = [
        n for n in given if not is_tangent(n) and not is_beside_local_part(n.meta.get("desc"))
    ]
    return tuple(i for i, node in enumerate(inputs) if node in read)
