"""From the costs of ops and the times of their whole step to the costs that a graph states.

What a step takes beyond its ops is booked on the arrival of the tangents: the one op that every
schedule runs exactly once and that costs nothing itself. So solvers, bounds and the judge need not
know of it.
"""

from __future__ import annotations

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.build import TANGENTS
from remat.graph_capture.prices.keeping_time import Costs, less_for_kept
from remat.graph_capture.prices.price_cache import WholeStep
from remat.graph_capture.prices.recompute_time import as_recomputed


def booked(graph: TrainingGraph, step: WholeStep) -> TrainingGraph:
    """`graph` taking the step's time in all, unless its ops alone take longer.

    Parameters
    ----------
    graph : with each op at the cost of a run on its own.
    """
    alone = costs_of(graph)
    # Keeping comes first: the step in segments was held against prices that are cheaper by it.
    cheaper = less_for_kept(graph, alone, step.keeping_us)
    costs = dict(as_recomputed(graph, cheaper, step.again_us, step.priced_us))
    ops_us = sum(costs.values())
    # A step in a fast spell may take less than its ops. No op then costs less than nothing.
    beyond_us = max(step.step_us, sum(alone.values()), ops_us) - ops_us
    for op in graph.ops:
        if op.target == TANGENTS:
            costs[op.name] += beyond_us
    return with_costs(graph, costs)


def costs_of(graph: TrainingGraph) -> dict[str, float]:
    """The cost of each op of `graph`, in its order."""
    return {op.name: op.cost_us for op in graph.ops}


def with_costs(graph: TrainingGraph, costs: Costs) -> TrainingGraph:
    """`graph` with these costs of its ops."""
    ops = tuple(msgspec.structs.replace(op, cost_us=costs[op.name]) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops)
