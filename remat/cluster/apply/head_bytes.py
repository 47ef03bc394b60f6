"""What follows the blocks of a model, in bytes: it runs as eager runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat.cluster.apply.block_bytes import BlockBytes
from remat.cluster.apply.stage_blocks import figures_of, with_own_sizes
from remat.graph_capture.cluster.rank_graph import border_value, planned_graph
from remat.graph_capture.derived.eager import as_eager
from remat.graph_capture.tracing.trace import trace
from remat.rewriter.stages.border import Arrival, Behind
from remat.solver.store_all import StoreAll


class _Head(nn.Module):
    """The modules behind the blocks, under their own names."""

    def __init__(self, modules: Mapping[str, nn.Module], run: Behind) -> None:
        super().__init__()
        for path, module in modules.items():
            self.add_module(path.replace(".", "_"), module)
        self.run = run

    def forward(self, border: Tensor) -> Any:
        return self.run(border)


def head_bytes(
    modules: Mapping[str, nn.Module], run: Behind, given: Arrival,
    loss_fn: Callable[..., Any], target: Any,
) -> BlockBytes:  # fmt: skip
    """What the head and the loss save and need for one microbatch."""
    border = torch.zeros_like(given.border).requires_grad_()
    head = _Head(modules, run)
    traced = trace(head, (border,), loss_fn=loss_fn, target=target, optimizer="none", split="none")
    graph = planned_graph(as_eager(with_own_sizes(traced.graph, traced)), border_value(traced))
    found = figures_of(graph, StoreAll().schedule(graph))
    gradients = sum(value.size_bytes for value in graph.values if value.kind == "gradient")
    own = sum(p.numel() * p.element_size() for p in head.parameters() if p.requires_grad)
    return BlockBytes(found.saved_bytes, found.need_bytes, min(own, gradients))
