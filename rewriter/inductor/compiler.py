"""Inductor in place of our own generated code: the compiler of a schedule's two graphs.

The graphs are those of `emit`: eager's ops in the schedule's order. AOTAutograd lets
`compile_fx_inner` compile them, so guards, views and mutation stay as they are. Three things differ
from what Inductor does by itself: ops that draw are functions of the stream's state
(`functional_draws`), what lasts across a call is stored (`decomposed`), and all results keep their
strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.exact_ops import DROPOUT_BACKWARD
from remat.graph_capture.joint.nodes import aten, copy_of, is_getitem, mutates, target_name
from remat.graph_capture.joint.provenance import FUNCTION_KEY, SOURCE_KEY
from remat.graph_capture.torch_private.core import FakeTensor, FakeTensorMode
from remat.graph_capture.torch_private.inductor import (
    REALIZE,
    compile_fx_inner,
    inductor_config,
    select_decomp_table,
)
from remat.rewriter.graphs.codegen import Boxed
from remat.rewriter.graphs.emit import emit
from remat.rewriter.graphs.rng import save_rng_state, set_rng_state
from remat.rewriter.inductor.choices import calls_in_order
from remat.rewriter.inductor.functional_draws import make_functional, underlying
from remat.rewriter.inductor.fused_emit import MOVED
from remat.rewriter.inductor.fused_nodes import is_generated, is_inlined, shares_storage
from remat.rewriter.inductor.kernel_costs import CallCosts
from remat.rewriter.inductor.partition import CONFIG
from remat.rewriter.inductor.replay import replay
from remat.schedules.schedule import Schedule


def decomposed(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """`gm` as Inductor wants it, with what lasts across a call stored, by the same schedule."""
    graph = _decomposed(gm, mode)
    for node in graph.graph.nodes:
        if node.op == "call_function" and mutates(node):
            raise RewriteError(
                f"Inductor decomposes {_place_of(node)} into {target_name(node)}, which writes to "
                "its argument, so a plan's order cannot be kept in its code. Leave out "
                "compile=True, which runs eager's ops"
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
        # The other graph of the step reads what this one saves by those. On a CPU, decomposed norms
        # return the statistics of bfloat16 inputs in bfloat16, where the kernels have float32.
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
            # Kernels read what is stored, or Inductor would compute it again in each.
            stored = graph.call_function(REALIZE, (copy,))
            stored.meta = dict(node.meta)
            copies[node, True] = stored
    graph.lint()
    return fx.GraphModule(gm, graph)


def _lasting(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Results of kernels, or of calls that Inductor moves, that a node after a later call reads."""
    place = {node: i for i, node in enumerate(nodes)}
    calls = [i for i, node in enumerate(nodes) if _is_call(node)]
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


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and not (
        is_generated(node) or shares_storage(node) or is_getitem(node)
    )


@dataclass(frozen=True)
class _Phase:
    """One of the two graphs as Inductor gets it, with inputs that AOTAutograd does not know.

    These are `constants`, tensors that the trace took in, then the random state of each device.
    """

    graph: fx.GraphModule
    constants: tuple[Tensor, ...]
    devices: tuple[str, ...]


class InductorStep:
    def __init__(self, joint: Joint, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self._joint = joint
        self._mode = _mode_of(forward)
        self._forward, self._backward = self._phase(forward), self._phase(backward)

    def peak_bytes(self) -> int:
        """Peak of the step in Inductor's code, generated and replayed; resident bytes count."""
        forward = copy_of(self._forward.graph)
        _without_states(forward, len(self._forward.devices))  # they go to the generators at once
        returned: Any = forward.graph.output_node().args[0]
        backward = copy_of(self._backward.graph)
        _without_states(backward, len(self._backward.devices))
        costs = CallCosts(forward, self._joint.graph.device)
        with inductor_config.patch(CONFIG), calls_in_order(True), torch.no_grad():
            found = replay(
                forward, backward, self._joint.num_forward_outputs,
                lambda calls: _workspaces(costs, calls), range(len(returned)),
            )  # fmt: skip
        return self._joint.graph.resident.total_bytes + found.peak_bytes

    def compile_forward(self, gm: fx.GraphModule, example_inputs: Any) -> Boxed:
        return self._compiled(self._forward, gm, is_backward=False)

    def compile_backward(self, gm: fx.GraphModule, example_inputs: Any) -> Boxed:
        return self._compiled(self._backward, gm, is_backward=True)

    def _phase(self, gm: fx.GraphModule) -> _Phase:
        graph = copy_of(gm)
        constants = _lift_constants(graph)
        devices = make_functional(graph)
        graph = decomposed(graph, self._mode)
        end = graph.graph.output_node()
        returned: Any = end.args[0]
        # Users and backward rely on the traced strides, so Inductor must keep those of all results.
        end.meta["user_visible_output_idxs"] = [
            i for i, result in enumerate(returned) if isinstance(result, fx.Node)
        ]
        return _Phase(graph, constants, devices)

    def _compiled(self, phase: _Phase, gm: fx.GraphModule, *, is_backward: bool) -> Boxed:
        _require_same_inputs(phase, gm)
        inputs = _inputs_of(phase.graph, self._mode)
        with inductor_config.patch(CONFIG), calls_in_order(True), torch.no_grad():
            run = compile_fx_inner(
                copy_of(phase.graph), inputs, is_backward=is_backward, static_input_idxs=()
            )
        return _with_own_inputs(run, phase)


def code_peak_bytes(joint: Joint, schedule: Schedule) -> int:
    return InductorStep(joint, *emit(joint, schedule, writes=False)).peak_bytes()


def _mode_of(gm: fx.GraphModule) -> FakeTensorMode:
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _require_same_inputs(phase: _Phase, gm: fx.GraphModule) -> None:
    # AOTAutograd may add inputs of its own after it has called the partitioner.
    given = [node.target for node in gm.graph.find_nodes(op="placeholder")]
    known = [node.target for node in phase.graph.graph.find_nodes(op="placeholder")]
    known = known[: len(known) - len(phase.constants) - len(phase.devices)]
    if given != known:
        other = next((n for n in (*given, *known) if n not in given or n not in known), given[0])
        raise RewriteError(
            f"AOTAutograd calls the step with other inputs than were planned ({other}), as where "
            "forward makes random numbers or tokens of effects by an op of its own. Leave out "
            "compile=True, which runs eager's ops"
        )


def _without_states(gm: fx.GraphModule, n_states: int) -> None:
    end = gm.graph.output_node()
    returned: Any = end.args[0]
    end.args = (tuple(returned[: len(returned) - n_states]),)


def _workspaces(costs: CallCosts, calls: Sequence[fx.Node]) -> list[int]:
    return [cost.workspace_bytes for cost in costs.of(map(underlying, calls))]


def _lift_constants(gm: fx.GraphModule) -> tuple[Tensor, ...]:
    # Inductor would write the numbers of small ones into its code, and not see when they change.
    constants: dict[str, fx.Node] = {}
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
    def called(args: list[Any]) -> Any:
        args.extend(phase.constants)
        args.extend(save_rng_state(device) for device in phase.devices)
        results: list[Any] = list(run(args))
        # The last results are the next states, one a device.
        for device in reversed(phase.devices):
            state: Tensor = results.pop()
            set_rng_state(state, device)
        return results

    # AOTAutograd then passes inputs in a list.
    called._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return called
