"""Inductor in place of our own generated code: the compiler of a schedule's two graphs.

Unlike in Inductor alone, draws are functions of the stream's state (`_make_functional`), what lasts
across a call is stored (`decomposed`), and results keep their strides.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.exact_ops import DROPOUT_BACKWARD
from remat.graph_capture.joint.nodes import (
    argument,
    aten,
    copy_of,
    drawn_on,
    draws_randomness,
    is_getitem,
    mutates,
    target_name,
)
from remat.graph_capture.joint.provenance import FUNCTION_KEY, SOURCE_KEY
from remat.graph_capture.torch_private.core import FakeTensor, FakeTensorMode
from remat.graph_capture.torch_private.inductor import (
    REALIZE,
    compile_fx_inner,
    select_decomp_table,
)
from remat.rewriter.graphs.codegen import Boxed, boxed
from remat.rewriter.graphs.emit import emit
from remat.rewriter.graphs.rng import run_with_rng_state, save_rng_state, set_rng_state
from remat.rewriter.inductor.fused_graph import MOVED
from remat.rewriter.inductor.fused_nodes import is_call, is_generated, is_inlined, shares_storage
from remat.rewriter.inductor.kernel_costs import CallCosts
from remat.rewriter.inductor.partition import calls_in_order
from remat.rewriter.inductor.replay import replay
from remat.schedules.schedule import Schedule

# A compiler moves or repeats what has no effects that it sees, and draws from a generator are
# unseen. So a draw takes the state as a tensor and returns the next: random numbers are eager's to
# the bit. The state is an input and an output of the graph; the caller puts it into the generator.
# A recomputation draws from the state that was saved.

_library = torch.library.Library("remat", "FRAGMENT")
_STATE = "random_state_"
_wrapped: dict[Any, Any] = {}


def _make_functional(gm: fx.GraphModule) -> tuple[str, ...]:
    """Make draws functional, in place; returns devices, whose states come in and go out last."""
    drawing = [node for node in gm.graph.nodes if draws_randomness(node)]
    for node in drawing:
        _refuse_own_generator(node)
    devices = tuple(dict.fromkeys(str(drawn_on(node)) for node in drawing))
    states = {device: _state_input(gm.graph, device) for device in devices}
    for node in list(gm.graph.nodes):
        if node.target is save_rng_state:
            node.replace_all_uses_with(states[str(node.args[0])])
            gm.graph.erase_node(node)
        elif node.target is run_with_rng_state:
            state, device, target, *args = node.args
            _change(node, target, (state, device, *args))  # from what was saved: the stream stays
        elif node in drawing:
            device = str(drawn_on(node))
            _change(node, node.target, (states[device], device, *node.args))
            states[device] = _next_state(node)  # the next draw reads what this one leaves
    end = gm.graph.output_node()
    returned: Any = end.args[0]
    end.args = ((*returned, *states.values()),)
    gm.recompile()
    return devices


def _refuse_own_generator(node: fx.Node) -> None:
    if argument(node, "generator") is not None:
        trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
        raise RewriteError(
            f"draw from the default generator, or rewrite without compile=True: {node.name} "
            f"({node.target}) draws from a generator of its own, which compiled code cannot. "
            f"{trace[-2].strip() if len(trace) > 1 else ''}"
        )


def _state_input(graph: fx.Graph, device: str) -> fx.Node:
    last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last[-1]) if last else graph.inserting_before(None):
        node = graph.placeholder(f"{_STATE}{device.replace(':', '_')}")
    node.meta["val"] = save_rng_state(device)
    return node


def _change(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let `node` run the functional form of `target`, and let its users read the same results."""
    value = node.meta["val"]
    node.target, node.args = functional_form(target), args
    if isinstance(value, Tensor):
        with node.graph.inserting_after(node):
            only = node.graph.call_function(operator.getitem, (node, 0))
        only.meta = dict(node.meta)  # it returns a tuple, of which users read the first
        node.replace_all_uses_with(only, delete_user_cb=lambda user: user is not only)
    results = (value,) if isinstance(value, Tensor) else tuple(value)
    node.meta = {**node.meta, "val": (*results, node.args[0].meta["val"])}  # pyright: ignore


def _next_state(node: fx.Node) -> fx.Node:
    results: Any = node.meta["val"]
    after = node
    while is_getitem(after.next):
        after = after.next
    with node.graph.inserting_after(after):
        state = node.graph.call_function(operator.getitem, (node, len(results) - 1))
    state.meta["val"] = results[-1]
    return state


def _underlying(node: fx.Node) -> fx.Node:
    """The call that a functional form wraps, as a node of its own; other nodes as they are."""
    if (wrapped := _wrapped.get(node.target)) is None:
        return node
    results = node.meta["val"][:-1]
    # Without the state and the device, which come first.
    call = fx.Graph().create_node("call_function", wrapped, node.args[2:], node.kwargs)
    call.meta = {**node.meta, "val": results[0] if len(wrapped._schema.returns) == 1 else results}
    return call


@functools.cache
def functional_form(target: Any) -> Any:
    """`target` without effects: takes ``(state, device)`` first, returns the next state last."""
    name = f"functional_{target.name().replace('::', '_').replace('.', '_')}"
    _library.define(_schema(name, target))
    _library.impl(name, _runner(target), "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{name}", _faked(target), lib=_library)
    made = getattr(torch.ops.remat, name).default
    _wrapped[made] = target
    return made


def _schema(name: str, target: Any) -> str:
    taken, _, given = str(target._schema).partition("(")[2].rpartition(") -> ")
    results = given.removeprefix("(").removesuffix(")")
    return f"{name}(Tensor random_state, str drawn_on, {taken}) -> ({results}, Tensor)"


def _runner(target: Any) -> Callable[..., tuple[Any, ...]]:  # by place, as names may clash
    def run(state: Tensor, device: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        now = save_rng_state(device)
        set_rng_state(state, device)
        try:
            return (*_as_tuple(target(*args, **kwargs)), save_rng_state(device))
        finally:
            set_rng_state(now, device)

    return run


def _faked(target: Any) -> Callable[..., tuple[Any, ...]]:
    def run(state: Tensor, device: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*_as_tuple(target(*args, **kwargs)), torch.empty_like(state))

    return run


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def decomposed(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """`gm` as Inductor wants it, with what lasts across a call stored, by the same schedule."""
    graph = _decomposed(gm, mode)
    for node in graph.graph.nodes:
        if node.op == "call_function" and mutates(node):
            raise RewriteError(
                "leave out compile=True, which runs eager's ops: Inductor decomposes "
                f"{_place_of(node)} into {target_name(node)}, which writes to its argument, so "
                "its code cannot keep a plan's order"
            )
    return _with_stored_results(graph)


def _place_of(node: fx.Node) -> str:
    place = node.meta.get("custom") or {}
    name, line = place.get(FUNCTION_KEY) or "an op of this step", place.get(SOURCE_KEY, "")
    return f"{name} ({line})" if line else name


def _inputs_of(gm: fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return [
        mode.from_tensor(v) if isinstance(v, Tensor) and not isinstance(v, FakeTensor) else v
        for v in values
    ]


def _decomposed(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    inputs = _inputs_of(gm, mode)
    table = select_decomp_table()
    # Our exact dropout's backward takes what torch's does.
    table = {**table, DROPOUT_BACKWARD: table[aten.native_dropout_backward.default]}
    with mode, preserve_node_meta(), torch.no_grad():
        run = _OfTracedDtypes(gm).run
        # The inputs are fake already.
        graph = make_fx(run, decomposition_table=table, tracing_mode="real")(*inputs)
    before = gm.graph.find_nodes(op="placeholder")
    after = graph.graph.find_nodes(op="placeholder")
    for old, new, value in zip(before, after, inputs, strict=True):
        new.target, new.meta["val"] = old.target, value
        new._rename(str(old.target))
    return graph


class _OfTracedDtypes(fx.Interpreter):
    """Runs a graph, and gives what decompositions return the dtypes of eager's kernels."""

    def run_node(self, n: fx.Node) -> Any:
        # The other graph reads saved values by these; decomposed norms may return bfloat16.
        return _of_dtypes(super().run_node(n), n.meta.get("val"))


def _of_dtypes(found: Any, traced: Any) -> Any:
    if isinstance(found, (tuple, list)) and isinstance(traced, (tuple, list)):
        pairs = zip(cast("Sequence[Any]", found), cast("Sequence[Any]", traced), strict=True)
        return type(found)(_of_dtypes(*pair) for pair in pairs)
    if isinstance(found, Tensor) and isinstance(traced, Tensor) and found.dtype != traced.dtype:
        return found.to(traced.dtype)
    return found


def _with_stored_results(gm: fx.GraphModule) -> fx.GraphModule:
    lasting = _lasting(list(gm.graph.nodes))
    graph = fx.Graph()
    copies: dict[tuple[fx.Node, bool], fx.Node] = {}

    def read(node: fx.Node, in_kernel: bool) -> fx.Node:
        if (node, in_kernel) not in copies:
            copies[node, in_kernel] = graph.node_copy(node, lambda n: read(n, in_kernel))
        return copies[node, in_kernel]

    for node in gm.graph.nodes:
        if shares_storage(node):  # kernels and calls read views of different nodes
            continue
        in_kernel = node.op == "call_function" and is_generated(node)
        copy = graph.node_copy(node, lambda n, k=in_kernel: read(n, k))
        copies[node, False] = copies[node, True] = copy
        if node in lasting:
            stored = graph.call_function(REALIZE, (copy,))  # or each reader would compute it again
            stored.meta = dict(node.meta)
            copies[node, True] = stored
    graph.lint()
    return fx.GraphModule(gm, graph)


def _lasting(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Results of kernels, or of calls that Inductor moves, that a node after a later call reads."""
    place = {node: i for i, node in enumerate(nodes)}
    calls = [i for i, node in enumerate(nodes) if is_call(node)]
    last = dict(place)
    for node in reversed(nodes):
        for source in node.all_input_nodes:
            last[source] = max(last[source], last[node] if shares_storage(node) else place[node])
    found: set[fx.Node] = set()
    for node in nodes:
        could_move = is_inlined(node) or node.target in MOVED
        if could_move and any(place[node] < at < last[node] for at in calls):
            found.add(node)
    return found


class _Phase(NamedTuple):
    """One of the two graphs as Inductor gets it, with inputs that AOTAutograd does not know."""

    graph: fx.GraphModule
    constants: tuple[Tensor, ...]  # tensors that the trace took in
    devices: tuple[str, ...]  # whose random states come last


class InductorStep:
    def __init__(self, joint: Joint, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self._joint = joint
        values = (node.meta.get("val") for node in forward.graph.find_nodes(op="placeholder"))
        self._mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        self._forward, self._backward = self._phase(forward), self._phase(backward)

    def peak_bytes(self) -> int:
        """Peak of the step in Inductor's code, generated and replayed; resident bytes count."""
        forward, backward = _without_states(self._forward), _without_states(self._backward)
        returned: Any = forward.graph.output_node().args[0]
        costs = CallCosts(forward, self._joint.graph.device)

        def workspaces(calls: Sequence[fx.Node]) -> list[int]:
            return [cost.workspace_bytes for cost in costs.of(map(_underlying, calls))]

        n_outputs, kept = self._joint.num_forward_outputs, range(len(returned))
        with calls_in_order(True), torch.no_grad():
            found = replay(forward, backward, n_outputs, workspaces, kept)
        return self._joint.graph.resident.total_bytes + found.peak_bytes

    def compile_forward(self, gm: fx.GraphModule) -> Boxed:
        return self._compiled(self._forward, gm, is_backward=False)

    def compile_backward(self, gm: fx.GraphModule) -> Boxed:
        return self._compiled(self._backward, gm, is_backward=True)

    def _phase(self, gm: fx.GraphModule) -> _Phase:
        graph = copy_of(gm)
        constants = _lift_constants(graph)
        devices = _make_functional(graph)
        graph = decomposed(graph, self._mode)
        end = graph.graph.output_node()
        returned: Any = end.args[0]
        end.meta["user_visible_output_idxs"] = [  # users and backward rely on traced strides
            i for i, result in enumerate(returned) if isinstance(result, fx.Node)
        ]
        return _Phase(graph, constants, devices)

    def _compiled(self, phase: _Phase, gm: fx.GraphModule, *, is_backward: bool) -> Boxed:
        _require_same_inputs(phase, gm)
        inputs = _inputs_of(phase.graph, self._mode)
        with calls_in_order(True), torch.no_grad():
            asked: Any = {"is_backward": is_backward, "static_input_idxs": ()}
            run = compile_fx_inner(copy_of(phase.graph), inputs, **asked)
        return _with_own_inputs(run, phase)


def code_peak_bytes(joint: Joint, schedule: Schedule) -> int:
    return InductorStep(joint, *emit(joint, schedule, writes=False)).peak_bytes()


def _require_same_inputs(phase: _Phase, gm: fx.GraphModule) -> None:
    # AOTAutograd may add inputs of its own after it has called the partitioner.
    given = [node.target for node in gm.graph.find_nodes(op="placeholder")]
    known = [node.target for node in phase.graph.graph.find_nodes(op="placeholder")]
    known = known[: len(known) - len(phase.constants) - len(phase.devices)]
    if given != known:
        other = next((n for n in (*given, *known) if n not in given or n not in known), given[0])
        raise RewriteError(
            "leave out compile=True, which runs eager's ops: AOTAutograd calls the step with "
            f"other inputs than planned ({other}), as where forward makes random numbers or "
            "effect tokens with an op of its own"
        )


def _without_states(phase: _Phase) -> fx.GraphModule:
    gm = copy_of(phase.graph)
    end = gm.graph.output_node()
    returned: Any = end.args[0]  # the states come last, and go to the generators at once
    end.args = (tuple(returned[: len(returned) - len(phase.devices)]),)
    return gm


def _lift_constants(gm: fx.GraphModule) -> tuple[Tensor, ...]:
    constants: dict[str, fx.Node] = {}  # Inductor would freeze small ones into its code
    for node in gm.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in constants:
            last = gm.graph.find_nodes(op="placeholder")[-1]
            with gm.graph.inserting_after(last):
                constants[name] = gm.graph.placeholder(f"constant_{len(constants)}")
            constants[name].meta["val"] = getattr(gm, name)
        node.replace_all_uses_with(constants[name])
        gm.graph.erase_node(node)
    gm.recompile()
    return tuple(node.meta["val"] for node in constants.values())


def _with_own_inputs(run: Any, phase: _Phase) -> Boxed:
    @boxed
    def called(args: list[Any]) -> Any:
        args.extend(phase.constants)
        args.extend(save_rng_state(device) for device in phase.devices)
        results: list[Any] = list(run(args))
        for device in reversed(phase.devices):  # the last results are the next states, one a device
            state: Tensor = results.pop()
            set_rng_state(state, device)
        return results

    return called
