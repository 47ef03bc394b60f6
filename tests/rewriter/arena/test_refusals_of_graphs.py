"""What no CUDA graph repeats is refused when the module is made, with the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import remat
from remat.graph_capture.errors import ArenaError, DeviceError, RewriteError
from remat.rewriter.arena.capturable import require_capturable_ops
from remat.rewriter.arena.captured import capture_steps
from remat.rewriter.graphs.rng import draw_noting
from remat.rewriter.rewriting import rewrite
from remat.solver import make_solver
from tests.fake_graphs import FakeGraphs, graphs
from tests.models import make
from tests.steps import rewritten

__all__ = ["graphs"]
CPU = torch.device("cpu")


def test_without_a_device_nothing_is_planned() -> None:
    model, args, *_ = make("plain")
    wanted = "move the model to one CUDA device before it is planned, or leave out cuda_graphs=True"
    with pytest.raises(DeviceError, match=f"{wanted}.* this Scalar is on cpu"):
        remat.rematerialize(model, args, budget="60%", cuda_graphs=True)


def test_a_switch_is_no_number() -> None:
    model, args, *_ = make("plain")
    with pytest.raises(RewriteError, match="cuda_graphs"):
        remat.rematerialize(model, args, budget="60%", cuda_graphs=1)  # pyright: ignore


def test_rewrite_has_the_option_too(graphs: FakeGraphs) -> None:
    model, args, *_ = make("plain")
    schedule = make_solver("chen_sqrt").schedule(remat.capture(model, args))
    module = rewrite(model, schedule, cuda_graphs=True)
    with pytest.raises(ArenaError, match="close the module's arena, or its graphs, first"):
        capture_steps(module)


def test_a_plan_that_releases_gradients_early(graphs: FakeGraphs) -> None:
    model, args, *_ = make("plain")
    module = remat.rematerialize(model, args, budget="100%", accumulate=True, check=False)
    with pytest.raises(
        RewriteError, match=r"plan with remat.rematerialize\(..., cuda_graphs=True\)"
    ):
        capture_steps(module)  # pyright: ignore


def test_draws_that_backward_repeats(graphs: FakeGraphs) -> None:
    _, module, _ = rewritten("plain", "store_all")
    graph = module.backward_module.graph
    with graph.inserting_before(graph.output_node()):
        graph.call_function(draw_noting, ())
    with pytest.raises(RewriteError, match="leave out cuda_graphs=True: an op of backward draws"):
        capture_steps(module)


class _WritesItsBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x.clone()).sum()
        x.mul_(2)
        return found


def test_a_step_that_writes_to_its_batch(graphs: FakeGraphs) -> None:
    model, args = _WritesItsBatch(), (torch.ones(2, 4),)
    schedule = make_solver("store_all").schedule(remat.capture(model, args))
    with pytest.raises(RewriteError, match="let forward work on a copy, or leave out cuda_graphs"):
        rewrite(model, schedule, args, cuda_graphs=True)


def _graph_of(target: Any, *more: Any, on: str = "cpu") -> fx.GraphModule:
    graph = fx.Graph()
    taken = graph.placeholder("x")
    taken.meta["val"] = torch.empty(3)
    made = graph.call_function(target, (taken, *more))
    made.meta["val"] = torch.empty(3, device=on)
    graph.output((made,))
    return fx.GraphModule(nn.Module(), graph)


@torch.library.custom_op("remat_tests_of_graphs::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    return x * 2


_twice.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("gm", "why"),
    [
        (
            _graph_of(torch.ops.aten.nonzero.default),
            "depends on values that the host must wait for",
        ),
        (_graph_of(torch.ops.aten.relu.default, on="meta"), "works on meta, and a graph on cpu"),
        (
            _graph_of(torch.ops._c10d_functional.all_reduce.default, "sum", "0"),
            "other ranks take part in it, and wait on their hosts",
        ),
        (
            _graph_of(torch.ops.remat_tests_of_graphs.twice.default),
            "a custom op may do more on the host than start kernels",
        ),
    ],
    ids=["values", "elsewhere", "collective", "custom"],
)
def test_ops_that_do_more_than_start_kernels(gm: fx.GraphModule, why: str) -> None:
    with pytest.raises(RewriteError, match=f"^leave out cuda_graphs=True, or leave .*{why}"):
        require_capturable_ops(gm, CPU)


def test_a_step_of_torchs_kernels_is_taken() -> None:
    require_capturable_ops(_graph_of(torch.ops.aten.relu.default), CPU)


def test_ops_are_looked_at_before_anything_is_solved(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(_twice(x))).sum()

    monkeypatch.setattr(remat.step_planner.StepPlanner, "solve", None)  # pyright: ignore
    with pytest.raises(RewriteError, match=re.escape("remat_tests_of_graphs.twice")):
        remat.rematerialize(Custom(), (torch.ones(2, 4),), budget="60%", cuda_graphs=True)


def test_a_kernel_that_cannot_be_captured(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, args = rewritten("plain", "store_all")
    capture_steps(module)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with graphs:
        module(*args).backward()
        monkeypatch.setattr(torch.cuda, "graph", refuse)
        with pytest.raises(ArenaError, match="leave out cuda_graphs=True: a kernel of this step"):
            module(*args)
