"""A copy of a traced graph, to be changed or run apart from the trace."""

from __future__ import annotations

from torch import fx


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph over the same constants and the same facts about its nodes.

    It takes one argument a placeholder, whatever the calling convention of `gm` is.
    """
    graph = fx.Graph()
    results = graph.graph_copy(gm.graph, {})
    output = graph.output(results)
    output.meta = dict(gm.graph.find_nodes(op="output")[0].meta)
    return fx.GraphModule(gm, graph)
