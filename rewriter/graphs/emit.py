"""Schedule → two fx graphs of eager's ops, which carry it out step by step."""

from __future__ import annotations

from torch import fx
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

from remat.graph_capture.joint.build import Joint
from remat.graph_capture.shapes.environment import Environment
from remat.rewriter.graphs.copied_writes import copy_times
from remat.rewriter.graphs.copies import Moving, MovingEmitter, written_by
from remat.rewriter.graphs.eager import EagerEmitter
from remat.rewriter.graphs.emitter import Demand, as_module, emit_both
from remat.rewriter.graphs.fewer_views import leave_out_views
from remat.rewriter.graphs.floats import FloatSource, read_floats
from remat.rewriter.graphs.gradient_strides import take_as_they_come
from remat.rewriter.graphs.sizes import read_sizes
from remat.rewriter.tiers.tier import Tier
from remat.schedules.schedule import Schedule


def emit(
    joint: Joint,
    schedule: Schedule,
    floats: FloatSource | None = None,
    metadata: ViewAndMutationMeta | None = None,
    *,
    writes: bool = True,
    env: Environment | None = None,
    tier: Tier | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward GraphModules that carry out `schedule`, in AOTAutograd's contract.

    Parameters
    ----------
    joint, schedule : the trace, and what to do with it.
    floats : what each step reads the numbers from that the joint graph marks.
    metadata : AOTAutograd's, if backward is to have gradients in the strides that they come in.
    writes : whether what eager writes in place is written in place.
    env : of a trace for a range of sizes: its symbols.
    tier : what the schedule copies values to; None for one that copies nothing.

    Raises
    ------
    RewriteError : the schedule has a step that cannot be carried out.
    """
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again: set[str] = set()

    moving: Moving | None = None
    if tier is not None:
        moving = Moving(tier, copy_times(schedule, lambda op: written_by(joint, op)))

    def start(demand: Demand, left_live: frozenset[str]) -> EagerEmitter:
        given = joint, demand, again, repeated, left_live, writes
        return MovingEmitter(*given, moving) if moving else EagerEmitter(*given)

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
