"""What decompositions change for Inductor, and what has to stay as the other graph reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from remat.graph_capture import trace
from remat.rewriter.graphs.emit import emit
from remat.rewriter.inductor.compiler import decomposed
from tests.steps import schedule_of

NORMS = {
    "batch": lambda: nn.BatchNorm1d(32),
    "layer": lambda: nn.LayerNorm(32),
    "group": lambda: nn.GroupNorm(4, 32),
}


class OfBfloat16(nn.Module):
    """A norm of bfloat16 numbers, with weights in float32, whose statistics backward reads."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.bias = norm, nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm((x + self.bias).bfloat16()).float().square().mean()


def returned_dtypes(gm: fx.GraphModule) -> list[torch.dtype | None]:
    returned: Any = gm.graph.output_node().args[0]
    return [node.meta["val"].dtype if isinstance(node, fx.Node) else None for node in returned]


@pytest.mark.parametrize("name", NORMS)
def test_backward_reads_what_forward_saves_by_its_dtype(name: str) -> None:
    torch.manual_seed(0)
    traced = trace(OfBfloat16(NORMS[name]()), (torch.randn(64, 32),))
    for graph in emit(traced.joint, schedule_of(traced.joint.graph, "store_all"), writes=False):
        mode = next(iter(graph.graph.find_nodes(op="placeholder"))).meta["val"].fake_mode
        assert returned_dtypes(decomposed(graph, mode)) == returned_dtypes(graph)
