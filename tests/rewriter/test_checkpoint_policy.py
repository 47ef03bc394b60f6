"""A schedule as a policy of torch's selective checkpointing: eager's bits, torch's peak."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from remat.graph_capture.devices.memory_events import measure_peak, measure_regions
from remat.graph_capture.errors import RewriteError, ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.checkpoint_policy import checkpoint_policy
from remat.schedules.kept_in_forward import kept_occurrences, live_after_forward
from remat.schedules.schedule import Schedule
from tests.models import MODELS, make

BLOCKS = 6


class Stack(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(p))
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def planned(model: nn.Module, x: Tensor, budget: str) -> tuple[TrainingGraph, Schedule]:
    graph = remat.capture(model, (x,))
    schedule = remat.solve(graph, budget, solver="cut").schedule
    assert schedule is not None
    return graph, schedule


@contextmanager
def checkpointed(model: Stack, contexts: Callable[[str], Any]) -> Iterator[None]:
    """Each block under a checkpoint with the contexts of its path."""
    for i, block in enumerate(model.blocks):
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=contexts(f"blocks.{i}")
        )
    yield
    for block in model.blocks:
        del block.forward


def outcome(model: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Loss, gradients and the generator's state of two steps, and the peak of a third."""
    found: list[Tensor] = []
    torch.manual_seed(0)
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    found.append(torch.get_rng_state())
    model.zero_grad()
    return found, measure_peak(lambda: model(x).backward())


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_blocks_under_the_policy_have_eagers_bits_and_a_lower_peak(p: float) -> None:
    model, x = Stack(p), torch.randn(256, 32)
    graph, schedule = planned(model, x, "55%")
    eager, eager_bytes = outcome(model, x)
    with checkpointed(model, lambda path: checkpoint_policy(graph, schedule, path).contexts):
        found, peak_bytes = outcome(model, x)
    assert same(found, eager)
    assert peak_bytes < 0.8 * eager_bytes


def test_what_is_saved_is_what_the_plan_keeps() -> None:
    """Live after forward: what the plan keeps, and what torch's checkpoints keep beside it."""
    model, x = Stack(), torch.randn(256, 32)
    graph, schedule = planned(model, x, "55%")
    live = live_after_forward(graph, schedule)
    planned_bytes = sum(graph.value_by_name[name].size_bytes for name in live)
    kept: list[Any] = []
    with checkpointed(model, lambda path: checkpoint_policy(graph, schedule, path).contexts):
        saved_bytes = measure_regions([lambda: kept.append(model(x))])[0].final_bytes
    entering_bytes = BLOCKS * x.nbytes
    state_bytes = BLOCKS * torch.get_rng_state().nbytes
    assert planned_bytes * 0.9 <= saved_bytes <= planned_bytes + entering_bytes + state_bytes


@pytest.mark.slow
def test_around_a_whole_model_the_bits_are_eagers_too() -> None:
    for name in ("plain", "attention", "transformer_layers", "lstm_cells", "in_place_views"):
        model, args, *_ = make(name)
        graph, schedule = planned(model, args[0], "85%")
        policy = checkpoint_policy(graph, schedule)
        eager, _ = outcome(model, args[0])
        wrapped = functools.partial(
            checkpoint, model.forward, use_reentrant=False, context_fn=policy.contexts
        )
        model.forward = wrapped
        assert same(outcome(model, args[0])[0], eager), name


def test_an_op_is_kept_where_it_runs_once_and_backward_finds_its_result() -> None:
    model, x = Stack(), torch.randn(256, 32)
    graph, everything = planned(model, x, "100%")
    _, schedule = planned(model, x, "55%")
    again = {name for name, times in schedule.computations().items() if times > 1}
    gelus = [op for op in graph.ops if op.target == "aten.gelu.default"]
    assert again
    assert kept_occurrences(graph, schedule)["aten.gelu.default"] == tuple(
        op.name not in again and op.outputs[0] in live_after_forward(graph, schedule)
        for op in gelus
    )
    assert kept_occurrences(graph, everything)["aten.gelu.default"] == (True,) * BLOCKS
    assert kept_occurrences(graph, everything, "blocks.1")["aten.gelu.default"] == (True,)


def test_the_policy_itself_counts_one_forward() -> None:
    model, x = Stack(), torch.randn(256, 32)
    graph, schedule = planned(model, x, "55%")
    policy = checkpoint_policy(graph, schedule)
    once = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(model, x, use_reentrant=False, context_fn=once).backward()
    with pytest.raises(RewriteError, match=r"this policy counts one"):
        checkpoint(model, x, use_reentrant=False, context_fn=once)


@pytest.mark.parametrize(
    "name", ["batch_norm_in_place_relu", "overwritten_buffer", "overwritten_input"]
)
def test_a_forward_with_effects_is_refused(name: str) -> None:
    assert name in MODELS
    model, args, kwargs, loss_fn, target = make(name)
    graph = remat.capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    schedule = remat.solve(graph, "100%", solver="cut").schedule
    assert schedule is not None
    with pytest.raises(
        RewriteError, match=r"changes buffers once: forward changes buffers or its batch, in"
    ):
        checkpoint_policy(graph, schedule)


def test_a_module_without_ops_and_another_graph_are_refused() -> None:
    model, x = Stack(), torch.randn(256, 32)
    graph, schedule = planned(model, x, "55%")
    with pytest.raises(
        RewriteError, match=r"no op of the graph is in module 'layers\.0': name one"
    ):
        checkpoint_policy(graph, schedule, "layers.0")
    other = remat.capture(model, (x[:8],))
    with pytest.raises(ScheduleError, match="made for another graph"):
        checkpoint_policy(other, schedule)


@pytest.mark.slow
def test_contexts_work_under_torch_compile() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(512, 32)
    graph, schedule = planned(model, x, "60%")
    torch._dynamo.reset()
    torch.compile(model)(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch._dynamo.reset()
    model.zero_grad()
    contexts = {f"blocks.{i}": policy(graph, schedule, f"blocks.{i}") for i in range(BLOCKS)}
    with checkpointed(model, contexts.__getitem__):
        torch.compile(model)(x).backward()
    torch._dynamo.reset()
    for gradient, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient)


def policy(graph: TrainingGraph, schedule: Schedule, path: str) -> Any:
    return checkpoint_policy(graph, schedule, path).contexts
