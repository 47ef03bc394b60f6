"""A trace for a range of sizes, as the trace at one size of it; and the graph over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.prices.op_work import flops_of
from remat.graph_capture.shapes.concrete import at_sizes
from remat.graph_capture.shapes.extents import extents_of
from remat.graph_capture.shapes.price_points import point_of
from remat.graph_capture.shapes.ranged_graph import RangedGraph, structure_of
from remat.graph_capture.shapes.ranges import Sizes, corner, spread
from remat.graph_capture.shapes.signature import RangedSignature
from remat.graph_capture.shapes.workspaces import WorkspacePoint, off_lines
from remat.graph_capture.tracing.one_trace import Trace, edit_traced, joint_of, num_forward_outputs
from remat.graph_capture.tracing.resident import resident_of_batch

Priced = Callable[[Trace], TrainingGraph]
WorkspacesOf = Callable[[Trace, Collection[str]], Mapping[str, int]]
MOST_SIZES = 16


def trace_at(trace: Trace, sizes: Sizes) -> Trace:
    """The trace of a range at one of its sizes. It can be priced, and not compiled.

    Raises
    ------
    CaptureError : the step has other ops at these sizes.
    """
    env, signature = trace.env, trace.recipe.signature
    assert env is not None
    assert isinstance(signature, RangedSignature)
    batch, device = signature.example_at(sizes), trace.recipe.device
    recipe = dataclasses.replace(
        trace.recipe,
        signature=signature.at(sizes),
        resident=resident_of_batch(trace.recipe.resident, batch, device),
    )
    gm = at_sizes(trace.descriptors.graph_module, env, sizes)
    edit_traced(gm, recipe)
    joint = joint_of(gm, num_forward_outputs(trace.descriptors), recipe, trace.repeats)
    _require_same_structure(trace.graph, joint.graph, sizes)
    return dataclasses.replace(trace, joint=joint, recipe=recipe, env=None, compiled=True)


def ranged_graph_of(
    trace: Trace, price: Priced, workspaces: WorkspacesOf | None = None
) -> RangedGraph:
    """The graph over the range of a trace, priced at its ends and its geometric middle.

    Workspaces that follow no formula are measured at up to `MOST_SIZES` of each size, with the
    others at their largest.

    Parameters
    ----------
    price : asked for the largest sizes first.
    workspaces : of the named ops of a trace; left out, none are measured beside prices.

    Raises
    ------
    CaptureError : the step has other ops at some size, or a size follows in a way not known.
    """
    env, signature = trace.env, trace.recipe.signature
    assert env is not None
    assert isinstance(signature, RangedSignature)
    corners = [corner(env.symbols, which) for which in ("low", "middle", "high")]
    traces = [(sizes, trace_at(trace, sizes)) for sizes in corners]
    graphs = [(sizes, one.graph) for sizes, one in traces]
    extents = extents_of(trace.descriptors.graph_module, env, graphs)
    ranged = RangedGraph(
        base=graphs[-1][1],
        symbols=env.symbols,
        extents=extents,
        inputs=signature.templates(),
        batch_bytes=signature.bytes_of_leaves(),
        guards=signature.guards,
        traced_hash=trace.graph.hash,
    )
    for sizes, graph in graphs:
        if ranged.at(**sizes) != graph:
            raise CaptureError(
                f"the step of {ranged.name} at {dict(sizes)} is not what follows from the range: "
                "leave out of dynamic what is laid out unlike its batch"
            )
    priced = [price(one) for _, one in reversed(traces)][::-1]
    base = msgspec.structs.replace(
        ranged.base, device=priced[-1].device, resident=priced[-1].resident
    )
    points = tuple(
        point_of(
            sizes,
            msgspec.structs.replace(one.graph, device=base.device),
            by_price,
            [_flops(one, op) for op in one.graph.ops],
        )
        for (sizes, one), by_price in zip(traces, priced, strict=True)
    )
    ranged = msgspec.structs.replace(ranged, base=base, points=points)
    if workspaces is None:
        return ranged
    return _with_workspaces(trace, ranged, [graph for _, graph in graphs], workspaces)


def _with_workspaces(
    trace: Trace, ranged: RangedGraph, graphs: Sequence[TrainingGraph], workspaces: WorkspacesOf
) -> RangedGraph:
    """With the workspaces that follow no formula at further sizes."""
    names = dict.fromkeys(off_lines(graphs, [one.workspace_bytes for one in ranged.points]))
    if not names:
        return ranged
    high, index = corner(ranged.symbols, "high"), ranged.base.op_index
    more: list[WorkspacePoint] = []
    known = [one.sizes for one in ranged.points]
    axes = [{**high, s.name: size} for s in ranged.symbols for size in spread(s, MOST_SIZES)]
    for sizes in (sizes for sizes in axes if sizes not in known):
        found = workspaces(trace_at(trace, sizes), names)
        made = [op.workspace_bytes for op in ranged.at(**sizes).ops]
        for name, workspace_bytes in found.items():
            made[index[name]] = workspace_bytes
        more.append(WorkspacePoint(sizes, tuple(made)))
    return msgspec.structs.replace(ranged, workspaces=tuple(more))


def _flops(trace: Trace, op: Op) -> int:
    node = trace.joint.node_of_op.get(op.name)
    return 0 if node is None else flops_of(node)


def _require_same_structure(traced: TrainingGraph, graph: TrainingGraph, sizes: Sizes) -> None:
    if structure_of(traced) == structure_of(graph):
        return
    pairs: Sequence[tuple[Op, Op]] = list(zip(traced.ops, graph.ops, strict=False))
    op = next((b for a, b in pairs if (a.name, a.target) != (b.name, b.target)), graph.ops[-1])
    place = ", ".join(part for part in (op.module, op.source) if part)
    raise CaptureError(
        f"at {dict(sizes)} the step of {graph.name} has other ops than elsewhere in the range, "
        f"first {op.target} ({place or op.name}): capture a range without these sizes"
    )
