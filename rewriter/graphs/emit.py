"""Schedule → two fx graphs of eager's ops, which carry it out step by step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from remat.graph_capture.distributed.dtensors import is_beside_local_part
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import aten, is_tangent
from remat.graph_capture.sizes.trace_over_sizes import Environment
from remat.graph_capture.torch_private.aot import ViewAndMutationMeta
from remat.rewriter.graphs.copies import CopyContext, CopyEmitter, copy_times, written_by
from remat.rewriter.graphs.eager import EagerEmitter
from remat.rewriter.graphs.emitter import Demand, as_module, emit_both
from remat.rewriter.graphs.result_gradients import take_as_they_come
from remat.rewriter.graphs.step_inputs import FloatSource, read_floats, read_sizes
from remat.rewriter.tiers.tier import TierCopies
from remat.schedules.kept_in_forward import end_of_forward
from remat.schedules.schedule import Compute, Schedule

# Autograd's backward formulas transpose what forward transposed, and reshape what it reshaped. In
# C++ a view costs next to nothing; from Python each is a call. If a view has the geometry of a
# tensor that it goes back to, it is that tensor. A reshape of a reshape is one reshape.


_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_VIEWS = (*_RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default)


def leave_out_views(graph: fx.Graph) -> None:
    # What the graph returns stays as it is.
    returned = set(graph.find_nodes(op="output")[0].all_input_nodes)
    for node in list(graph.nodes):
        if not _is_view(node) or node in returned:
            continue
        same = _same_before(node)
        if same is not None:
            node.replace_all_uses_with(same)
        else:
            _skip_reshape(node)
    for node in reversed(list(graph.nodes)):
        if _is_view(node) and not node.users:
            graph.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _VIEWS


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    tensor: Tensor = node.meta["val"]
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _same_before(node: fx.Node) -> fx.Node | None:
    wanted, source = _geometry(node), _source(node)
    while _geometry(source) != wanted:
        if not _is_view(source):
            return None
        source = _source(source)
    return source


def _skip_reshape(node: fx.Node) -> None:
    while node.target in _RESHAPES and _source(node).target in _RESHAPES:
        base = _source(_source(node))
        if not base.meta["val"].is_contiguous():  # else there may be no such view
            return
        node.update_arg(0, base)


def emit(
    joint: Joint,
    schedule: Schedule,
    floats: FloatSource | None = None,
    metadata: ViewAndMutationMeta | None = None,
    *,
    writes: bool = True,
    env: Environment | None = None,
    tier: TierCopies | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward GraphModules that carry out `schedule`, in AOTAutograd's contract.

    With AOTAutograd's `metadata`, backward takes gradients in the strides that they come in. With
    `writes`, what eager writes in place is written in place. `env` is of a trace for a range of
    sizes, `tier` what the schedule copies values to.
    """
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again: set[str] = set()  # of both graphs: what runs in backward may have run in forward

    moving: CopyContext | None = None
    if tier is not None:
        moving = CopyContext(tier, copy_times(schedule, lambda op: written_by(joint, op)))

    def start(demand: Demand, left_live: frozenset[str]) -> EagerEmitter:
        given = joint, demand, again, repeated, left_live, writes
        return CopyEmitter(*given, moving) if moving else EagerEmitter(*given)

    graphs = emit_both(joint, schedule, joint.num_forward_outputs, start)
    if metadata is not None:
        take_as_they_come(metadata, graphs[1])
    for graph in graphs:
        leave_out_views(graph)
    forward, backward = graphs
    if floats:
        read_floats(forward, backward, floats, joint.num_forward_outputs)
    if env:
        read_sizes(forward, backward, env)
    return as_module(joint, forward), as_module(joint, backward)


def recompute_inputs(joint: Joint, schedule: Schedule) -> tuple[int, ...]:
    # Eager has saved what was made of them, so it does not notice if they change before backward:
    # an input buffer that the next batch is copied into, a weight changed by `.data`.
    graph, end = joint.graph, end_of_forward(joint.graph, schedule)
    again = {step.op for step in schedule.steps[end:] if isinstance(step, Compute)}
    ops = [graph.ops[graph.op_index[name]] for name in again]
    values = {value for op in ops if op.phase == "forward" for value in op.inputs}
    read = {joint.base_of_value.get(value) for value in values}
    return tuple(i for i, node in enumerate(_inputs(joint)) if node in read)


def _inputs(joint: Joint) -> list[fx.Node]:
    # A DTensor is one input of several nodes: its local part stands for it.
    given = joint.module.graph.find_nodes(op="placeholder")
    return [n for n in given if not is_tangent(n) and not is_beside_local_part(n.meta.get("desc"))]
