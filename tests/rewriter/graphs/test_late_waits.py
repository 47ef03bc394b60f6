"""Sums over ranks go on beside other ops, until their result is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from msgspec.structs import replace
from torch import Tensor, fx, nn

import remat
from remat.graph_capture import trace
from remat.graph_capture.distributed.collectives import fake_ranks, is_collective, is_wait
from remat.rewriter.graphs.emit import emit
from remat.schedules.schedule import Free


def summed(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def gathered(x: Tensor) -> Tensor:
    return functional.all_gather_tensor(x, 0, dist.group.WORLD)[:4]


class Beside(nn.Module):
    """Two sines of the input are computed between a collective and its reader."""

    def __init__(self, collective: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.collective, self.inner = collective, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found = self.collective(self.inner(x).tanh())
        return x.sin().sin() * found


class Unread(nn.Module):
    """Nothing reads what the ranks sum up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        summed(x.sin())
        return self.inner(x).tanh()


def emitted(model: nn.Module, *, frees: bool = True) -> tuple[list[fx.Node], list[fx.Node]]:
    """Calls of forward and of backward, of a plan that keeps everything."""
    with fake_ranks(2):
        joint = trace(model, (torch.randn(4, 8),)).joint
        schedule = remat.solve(joint.graph, 1 << 40, "store_all").schedule
        assert schedule is not None
        if not frees:
            steps = tuple(step for step in schedule.steps if not isinstance(step, Free))
            schedule = replace(schedule, steps=steps)
        forward, backward = (
            [node for node in gm.graph.nodes if node.op == "call_function"]
            for gm in emit(joint, schedule)
        )
    return forward, backward


def between(nodes: list[fx.Node]) -> list[str]:
    """What runs between the first collective and its wait."""
    begun = next(i for i, node in enumerate(nodes) if is_collective(node))
    ended = next(i for i, node in enumerate(nodes) if is_wait(node))
    return [str(node.target) for node in nodes[begun + 1 : ended]]


@pytest.mark.parametrize(("collective", "is_late"), [(summed, True), (gathered, False)])
def test_a_sum_is_waited_for_where_it_is_read(
    collective: Callable[[Tensor], Tensor], is_late: bool
) -> None:
    forward, backward = emitted(Beside(collective))
    assert between(forward) == ["aten.sin.default"] * 2 * is_late
    assert between(backward) == []


@pytest.mark.parametrize("frees", [True, False])
def test_a_sum_has_ended_before_its_memory_is_given_away(frees: bool) -> None:
    forward, _ = emitted(Unread(), frees=frees)
    later = [str(node.target) for node in forward if "all_reduce" not in str(node.target)]
    place = later.index("_c10d_functional.wait_tensor.default")
    assert later[place - 1] == ("aten.sin.default" if frees else "aten.tanh.default")
