"""The unmodified step of a model with checkpoints of its own: predicted as it is measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import remat
from remat.budgets import unmodified
from remat.graph_capture import Trace, measure_costs, trace
from remat.graph_capture.eager_step import CPU_STATE_BYTES
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.solver import solve_within
from tests.limits import AMPLE_S
from tests.rows import rows

Call = Callable[[nn.Module, Tensor], Tensor]
checkpointed = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """A residual block of a transformer's MLP."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.softmax(self.up(self.norm(x)), -1).tanh()
        return x + self.drop(self.down(hidden))


class Blocks(nn.Module):
    """Blocks, each called by `call`, behind a first layer."""

    def __init__(self, call: Call, dropout: float = 0.0) -> None:
        super().__init__()
        self.call, self.first = call, nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(32, dropout) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpointed(lambda y: checkpointed(block, y) * 2, x)


def keeping_all(block: nn.Module, x: Tensor) -> Tensor:
    def context_fn() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    return checkpointed(block, x, context_fn=context_fn)


def in_two_segments(model: Blocks, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(model.blocks), 2, model.first(x), use_reentrant=False)


class Sequential(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return in_two_segments(self, x).square().mean()


MAKE: dict[str, Callable[[], nn.Module]] = {
    "each block": lambda: Blocks(checkpointed),
    "each block, with dropout": lambda: Blocks(checkpointed, 0.2),
    "one within another": lambda: Blocks(nested),
    "in two segments": lambda: Sequential(checkpointed, 0.1),
    "one that keeps all by a policy": lambda: Blocks(keeping_all),
    "none": lambda: Blocks(lambda block, x: block(x), 0.2),
}
NOT_PREDICTED = {"one within another": 4 * CPU_STATE_BYTES + 24}
"""Bytes: a state of the random stream for each inner one, and three results of eight bytes."""
QUICK = {"each block, with dropout"}


def case(name: str) -> tuple[nn.Module, tuple[Tensor], Trace]:
    torch.manual_seed(0)
    model, args = MAKE[name](), (torch.randn(512, 32),)
    return model, args, trace(model, args)


@pytest.mark.parametrize("name", rows(MAKE, QUICK.__contains__))
@pytest.mark.parametrize("is_lower", [False, True], ids=["float32", "autocast"])
def test_its_peak_is_as_measured_and_a_plan_at_100_per_cent_needs_no_more(
    name: str, is_lower: bool
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=is_lower):
        model, args, traced = case(name)
        graph = measure_costs(traced)
        schedule = remat.solve(graph, "100%", "cut", time_limit_s=AMPLE_S).schedule
        assert schedule is not None
        found = check(model, rewrite(model, schedule, trace=traced), args, steps=1)
    assert found.equal
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
    more_bytes = found.baseline_peak_bytes - unmodified(graph).peak_bytes
    if name == "one that keeps all by a policy":  # it keeps what backward does not read, too
        assert more_bytes > 0
    else:
        assert more_bytes == NOT_PREDICTED.get(name, 0)


def test_the_state_of_the_random_stream_that_each_keeps_has_its_true_size() -> None:
    assert torch.get_rng_state().nbytes == CPU_STATE_BYTES


def test_checkpoints_take_less_memory_and_more_time_than_keeping_all() -> None:
    graph = measure_costs(case("each block")[2])
    everything, eager = solve_within(graph, 2**62, "store_all"), unmodified(graph)
    assert {op.checkpoint for op in graph.ops if op.phase == "forward"} == {0, 1, 2, 3, 4}
    assert not any(op.checkpoint for op in graph.ops if op.phase == "backward")
    assert eager.peak_bytes < 0.7 * everything.peak_bytes
    assert eager.time_us > 1.05 * everything.time_us
    at_its_peak = remat.solve(graph, eager.peak_bytes, "cut", time_limit_s=AMPLE_S)
    assert at_its_peak.time_us < eager.time_us


def test_a_file_that_names_no_value_as_written_over_is_read_as_one_that_names_none() -> None:
    graph = measure_costs(case("none")[2])
    first, second = (value.name for value in graph.values[-2:])
    wrong = {first: second, second: "not there"}
    values = tuple(
        msgspec.structs.replace(value, written_over=wrong.get(value.name, value.written_over))
        for value in graph.values
    )
    edited = msgspec.structs.replace(graph, values=values)
    assert unmodified(edited).peak_bytes == unmodified(graph).peak_bytes


def test_the_file_of_a_graph_keeps_them() -> None:
    graph = measure_costs(case("in two segments")[2])
    again = TrainingGraph.from_json(graph.to_json())
    assert again == graph
    assert unmodified(again).peak_bytes == unmodified(graph).peak_bytes
