"""The step that computes forward again in segments, and costs held against it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.graph_capture import trace
from remat.graph_capture.costs.cache import WholeStepTimes
from remat.graph_capture.costs.step_time import (
    LEAST_OF_RECOMPUTING,
    MOST_OF_RECOMPUTING,
    Costs,
    as_recomputed,
    calibrated,
    costs_of,
    recomputing,
    with_costs,
)
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.joint.nodes import copy_of
from remat.graph_capture.tracing.traced_step import Trace
from tests.graph_capture.traced_models import at_100_us, traced

EXACT = ["plain", "batch_norm_in_place_relu", "tied_weights", "logits_without_loss"]
DRAWING = ["dropout", "transformer_layers"]


def inputs(one: Trace) -> list[Any]:
    torch.manual_seed(0)

    def made(like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype)
        return torch.rand(like.shape, dtype=like.dtype)

    placeholders = one.joint.module.graph.find_nodes(op="placeholder")
    return [made(node.meta.get("val")) for node in placeholders]


@pytest.mark.parametrize("name", EXACT)
def test_the_step_gives_what_it_gave(name: str) -> None:
    one = traced(name)
    given = inputs(one)
    expected = copy_of(one.joint.module)(*given)
    found = recomputing(one.joint).module(*given)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("name", EXACT + DRAWING)
def test_what_is_said_to_run_again_does_and_nothing_else(name: str) -> None:
    one = traced(name)
    twice = recomputing(one.joint)
    before = Counter(n.target for n in one.joint.module.graph.nodes if n.op == "call_function")
    after = Counter(n.target for n in twice.module.graph.nodes if n.op == "call_function")
    of_ops = Counter(one.joint.node_of_op[op].target for op in twice.again)
    targets_of_ops = {node.target for node in one.joint.node_of_op.values()}
    more = {target: n for target, n in (after - before).items() if target in targets_of_ops}
    assert more == of_ops
    assert not before - after
    assert len(set(twice.again)) == len(twice.again)
    ops = [one.graph.ops[one.graph.op_index[op]] for op in twice.again]
    assert all(op.phase == "forward" and not op.no_recompute for op in ops)


def test_a_deep_step_needs_less_memory_for_it() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(16) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    one = trace(torch.nn.Sequential(*layers), (torch.randn(512, 64),))
    given = inputs(one)
    whole, twice = copy_of(one.joint.module), recomputing(one.joint)
    assert len(twice.again) >= 16
    with torch.no_grad():
        kept_bytes = measure_peak(lambda: whole(*given))
        assert measure_peak(lambda: twice.module(*given)) < 0.7 * kept_bytes


@pytest.mark.parametrize("again_us", [250.0, 400.0, 1000.0])
def test_forward_is_costed_between_its_ops_and_what_it_took(again_us: float) -> None:
    graph = at_100_us(traced("plain").graph)
    found = with_costs(graph, as_recomputed(graph, costs_of(graph), again_us, 400.0))
    for before, after in zip(graph.ops, found.ops, strict=True):
        low, high = sorted((before.cost_us, before.cost_us * again_us / 400.0))
        assert low <= after.cost_us <= high
        assert after.cost_us == before.cost_us or before.phase == "forward"
    assert (found.time_us == graph.time_us) == (again_us == 400.0)
    assert found.hash == graph.hash


def test_a_clock_that_is_far_off_does_not_count_in_full() -> None:
    graph = at_100_us(traced("plain").graph)
    costs = costs_of(graph)

    def taking(again_us: float, expected_us: float = 400.0) -> Costs:
        return as_recomputed(graph, costs, again_us, expected_us)

    assert taking(0.0) == taking(LEAST_OF_RECOMPUTING * 400.0)
    assert taking(1e9) == taking(MOST_OF_RECOMPUTING * 400.0)
    assert taking(0.0, 0.0) == costs


def test_the_step_takes_what_it_was_seen_to_take() -> None:
    graph = at_100_us(traced("plain").graph)
    assert calibrated(graph, WholeStepTimes(1e6, 0.0, 500.0, 400.0)).time_us == pytest.approx(1e6)
