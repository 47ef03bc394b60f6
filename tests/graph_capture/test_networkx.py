"""A step as a graph of networkx: ops are nodes, and values edges with their bytes."""

from __future__ import annotations

import networkx as nx
import torch
from torch import nn

import remat


def test_ops_are_nodes_and_values_are_edges() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    graph = remat.capture(model, (torch.randn(4, 8),))
    found = graph.to_networkx()
    assert list(found) == [op.name for op in graph.ops]
    assert nx.is_directed_acyclic_graph(found)
    relu = found.nodes["relu"]
    assert (relu["phase"], relu["module"], relu["target"]) == ("forward", "1", "aten.relu.default")
    assert relu["cost_us"] == graph.ops[graph.op_index["relu"]].cost_us > 0
    readers = {reader: facts for _, reader, facts in found.out_edges("relu", data=True)}
    assert readers.keys() == {op.name for op in graph.ops if "relu" in op.inputs}
    assert all(facts["size_bytes"] == 4 * 16 * 4 for facts in readers.values())
    assert all(facts["shape"] == (4, 16) for facts in readers.values())


def test_a_range_has_its_largest_sizes() -> None:
    graph = remat.capture(
        nn.Linear(8, 8), (torch.randn(4, 8),), dynamic={"input": {0: ("n", 2, 6)}}
    )
    found = graph.to_networkx()
    assert nx.utils.graphs_equal(found, graph.top.to_networkx())
    sizes = {facts["shape"][0] for _, _, facts in found.edges(data=True)}
    assert 6 in sizes
    assert 4 not in sizes
