"""Loops that forward unrolls: what is alike in each step is timed once, however many there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat.graph_capture import trace
from remat.graph_capture.costs.op_costs import examples
from remat.graph_capture.joint.nodes import copy_of

LARGER = (nn.LSTMCell, nn.GRUCell)


class Unrolled(nn.Module):
    """A cell over the steps of a batch, which is ``batch x steps x width``."""

    def __init__(self, cell: type[nn.RNNCellBase], width: int = 16) -> None:
        super().__init__()
        self.cell, self.head = cell(width, width), nn.Linear(width, 4)  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, given = None, list[torch.Tensor]()
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            given.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(given, 1).square().mean()


def keys_of(cell: type[nn.RNNCellBase], steps: int, width: int = 16) -> set[str]:
    traced = trace(Unrolled(cell, width), (torch.randn(2, steps, width),))
    return {key.replace(f"{steps}", "steps") for key in examples(traced.joint)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", [nn.RNNCell, *(pytest.param(c, marks=pytest.mark.slow) for c in LARGER)]
)
def test_more_steps_are_no_more_costs(cell: type[nn.RNNCellBase]) -> None:
    few, many = keys_of(cell, 10, 32), keys_of(cell, 20, 32)
    assert len(few) == len(many) < 60


def test_other_places_in_a_line_of_the_cache_are_other_costs() -> None:
    """Rows of 3 floats begin at 16 places of a line, so kernels meet 16 alignments."""
    products = [key for key in keys_of(nn.RNNCell, 20, 3) if key.startswith("aten.addmm")]
    offsets = {key.split("+")[2].split("'")[0] for key in products}
    assert len(offsets) == 16


def test_an_edited_copy_runs_what_was_edited() -> None:
    joint = trace(Unrolled(nn.RNNCell), (torch.randn(2, 3, 16),)).joint
    before = len(joint.module.graph.nodes)

    def first_result_alone(graph: torch.fx.Graph) -> None:
        output = graph.output_node()
        output.args = ((output.args[0][0],),)  # pyright: ignore
        graph.eliminate_dead_code()

    edited = copy_of(joint.module, first_result_alone)
    assert len(edited.graph.nodes) < before == len(joint.module.graph.nodes)
    inputs = [node.meta.get("val") for node in joint.module.graph.find_nodes(op="placeholder")]
    made = [torch.ones(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs]
    assert torch.equal(edited(*made)[0], copy_of(joint.module)(*made)[0])
