"""A trace for a range of sizes, as the trace at one size of it; and the graph over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from torch import Tensor, fx

from remat.graph_capture.costs.cache import flops_of
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.joint.nodes import is_tangent, result_bytes, tensors_of
from remat.graph_capture.sizes.range_costs import CostPoint, WorkspacePoint, off_lines, point_of
from remat.graph_capture.sizes.ranged_chunks import Extent
from remat.graph_capture.sizes.ranged_graph import RangedGraph, structure_of
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import Sizes, corner, evaluated, spread
from remat.graph_capture.sizes.trace_over_sizes import Environment, at_sizes
from remat.graph_capture.tracing.resident import resident_of_batch
from remat.graph_capture.tracing.traced_step import (
    Trace,
    edit_traced,
    joint_of,
    num_forward_outputs,
)

_Evaluated = tuple[Sizes, TrainingGraph]  # sizes, and the graph built of the trace at these sizes


def _extents_of(
    gm: fx.GraphModule, env: Environment, graphs: Sequence[_Evaluated]
) -> dict[str, Extent]:
    """Symbolic shape and bytes of each value that varies; held against `graphs`, at some sizes."""
    traced = dict(_traced_values(gm, env))
    found: dict[str, Extent] = {}
    for same in zip(*(graph.values for _, graph in graphs), strict=True):
        first = same[0]
        # What is equal at these sizes may vary at others, so the traced texts decide too.
        if all((v.shape, v.size_bytes) == (first.shape, first.size_bytes) for v in same):
            texts = traced.get(first.name)
            is_write = not first.size_bytes and not first.shape  # stands for one, and is no tensor
            if is_write or texts is None:
                continue
            if all(text.isdigit() for text in (*texts.shape, texts.size_bytes)):
                continue
        extent = traced.get(first.name) or traced.get(first.name.rpartition(".")[0])
        if extent is None or not all(
            tuple(evaluated(text, sizes) for text in extent.shape) == value.shape
            and evaluated(extent.size_bytes, sizes) == value.size_bytes
            for value, (sizes, _) in zip(same, graphs, strict=True)
        ):
            raise CaptureError(
                f"leave out of dynamic what {first.name} depends on: how its shape, made by "
                f"{first.producer or 'the batch'}, follows from the varying sizes is not known"
            )
        found[first.name] = extent
    return found


def _traced_values(gm: fx.GraphModule, env: Environment) -> Iterator[tuple[str, Extent]]:
    """Extents by the names that values of each node may have."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        several = isinstance(value, (tuple, list))
        for i, tensor in enumerate(tensors_of(node)):
            if isinstance(tensor, Tensor):
                shape = tuple(env.text(n) for n in tensor.shape)
                size_bytes: Any = result_bytes(node, tensor)
                if is_tangent(node):  # see `ValueTable.add_tangents`
                    size_bytes = tensor.numel() * tensor.element_size()
                name = f"{node.name}.{i}" if several else node.name
                yield name, Extent(shape, env.text(size_bytes))


_CostModel = Callable[[Trace], TrainingGraph]
WorkspacesOf = Callable[[Trace, Collection[str]], Mapping[str, int]]
_MOST_SIZES = 16


def _range_of(trace: Trace) -> tuple[Environment, RangedSignature]:
    env, signature = trace.env, trace.recipe.signature
    assert env is not None
    assert isinstance(signature, RangedSignature)
    return env, signature


def trace_at(trace: Trace, sizes: Sizes) -> Trace:
    """The trace of a range at one of its sizes. Its ops can be timed; it cannot be compiled."""
    env, signature = _range_of(trace)
    batch, device = signature.example_at(sizes), trace.recipe.device
    resident = resident_of_batch(trace.recipe.resident, batch, device)
    recipe = dataclasses.replace(  # heads in chunks are measured apart
        trace.recipe, signature=signature.at(sizes), resident=resident, split="none"
    )
    gm = at_sizes(trace.descriptors.graph_module, env, sizes)
    edit_traced(gm, recipe)
    joint = joint_of(gm, num_forward_outputs(trace.descriptors), recipe, trace.duplicate_outputs)
    _require_same_structure(trace.graph, joint.graph, sizes)
    # AOTAutograd's record is that of the range.
    return dataclasses.replace(trace, joint=joint, recipe=recipe, env=None, compiled=True)


def ranged_graph_of(
    trace: Trace, cost_model: _CostModel, workspaces: WorkspacesOf | None = None
) -> RangedGraph:
    """The graph over a trace's range, with costs at its ends and geometric middle; the largest
    sizes are asked for first. Workspaces without a formula are measured at up to `_MOST_SIZES` of
    each size; without `workspaces`, none are beside costs."""
    env, signature = _range_of(trace)
    corners = [corner(env.symbols, which) for which in ("low", "middle", "high")]
    traces = [(sizes, trace_at(trace, sizes)) for sizes in corners]
    graphs = [(sizes, one.graph) for sizes, one in traces]
    extents = _extents_of(trace.descriptors.graph_module, env, graphs)
    ranged = RangedGraph(
        base=graphs[-1][1], symbols=env.symbols, extents=extents, inputs=signature.templates(),
        batch_bytes=signature.bytes_of_leaves(), guards=signature.guards,
        traced_hash=trace.graph.hash,
    )  # fmt: skip
    for sizes, graph in graphs:  # formulas have to give what was traced at each
        if ranged.at(**sizes) != graph:
            raise CaptureError(
                "leave out of dynamic what is laid out unlike its batch: the step of "
                f"{ranged.name} at {dict(sizes)} does not follow from the range"
            )
    costed = [cost_model(one) for _, one in reversed(traces)][::-1]
    top = costed[-1]
    base = replace(ranged.base, device=top.device, resident=top.resident, links=top.links)
    points: list[CostPoint] = []
    for (sizes, one), with_costs in zip(traces, costed, strict=True):
        nodes = (one.joint.node_of_op.get(op.name) for op in one.graph.ops)
        flops = [0 if node is None else flops_of(node) for node in nodes]
        plain = replace(one.graph, device=base.device)
        points.append(point_of(sizes, plain, with_costs, flops))
    ranged = replace(ranged, base=base, points=tuple(points))
    if workspaces is None:
        return ranged
    return _with_workspaces(trace, ranged, [graph for _, graph in graphs], workspaces)


def _with_workspaces(
    trace: Trace, ranged: RangedGraph, graphs: Sequence[TrainingGraph], workspaces: WorkspacesOf
) -> RangedGraph:
    names = dict.fromkeys(off_lines(graphs, [one.workspace_bytes for one in ranged.points]))
    if not names:
        return ranged
    high, index = corner(ranged.symbols, "high"), ranged.base.op_index
    more: list[WorkspacePoint] = []
    known = [one.sizes for one in ranged.points]
    axes = [{**high, s.name: size} for s in ranged.symbols for size in spread(s.sizes, _MOST_SIZES)]
    for sizes in (sizes for sizes in axes if sizes not in known):
        found = workspaces(trace_at(trace, sizes), names)
        made = [op.workspace_bytes for op in ranged.at(**sizes).ops]
        for name, workspace_bytes in found.items():
            made[index[name]] = workspace_bytes
        more.append(WorkspacePoint(sizes, tuple(made)))
    return replace(ranged, workspaces=tuple(more))


def _require_same_structure(traced: TrainingGraph, graph: TrainingGraph, sizes: Sizes) -> None:
    if structure_of(traced) == structure_of(graph):
        return
    pairs: Sequence[tuple[Op, Op]] = list(zip(traced.ops, graph.ops, strict=False))
    op = next((b for a, b in pairs if (a.name, a.target) != (b.name, b.target)), graph.ops[-1])
    place = ", ".join(part for part in (op.module, op.source) if part)
    raise CaptureError(
        f"capture a range without these sizes: at {dict(sizes)} the step of {graph.name} has "
        f"other ops than elsewhere, first {op.target} ({place or op.name})"
    )
