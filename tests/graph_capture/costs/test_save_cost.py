"""What keeping results for backward takes: measured on forward alone, taken off what keeps them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.graph_capture.costs.cache import WholeStepTimes
from remat.graph_capture.costs.step_time import (
    LEAST_KEPT_PART,
    ForwardWatch,
    calibrated,
    costs_of,
    dropping,
    less_for_kept,
    with_forward_timed,
)
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import copy_of
from tests.graph_capture.traced_models import at_100_us, traced

NAMES = ["plain", "dropout", "batch_norm_in_place_relu", "tied_weights", "logits_without_loss"]


def kept_bytes(graph: TrainingGraph) -> dict[str, int]:
    """Bytes of each forward op that backward reads."""
    read = {name for op in graph.ops if op.phase == "backward" for name in op.inputs}
    return {
        op.name: sum(graph.value_by_name[name].size_bytes for name in op.outputs if name in read)
        for op in graph.ops
        if op.phase == "forward"
    }


def _zeros(like: Any) -> Any:
    return torch.zeros(like.shape, dtype=like.dtype) if isinstance(like, Tensor) else like


class Bytes(ForwardWatch):
    """Notes the bytes of all tensors that are there when forward begins, and when it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def begin(self) -> None:
        alive = [one.untyped_storage() for one in gc.get_objects() if type(one) is Tensor]
        self.seen.append(sum({one._cdata: one.nbytes() for one in alive}.values()))

    end = begin


def _made_inputs(joint: Joint) -> list[Any]:
    return [_zeros(one.meta.get("val")) for one in joint.module.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_watched_until_what_backward_reads_is_there(name: str) -> None:
    one, watch = traced(name), Bytes()
    inputs = _made_inputs(one.joint)
    with_forward_timed(one.joint, watch)(*inputs)
    before, after = watch.seen
    kept, own = sum(kept_bytes(one.graph).values()), dropping(one.joint)(*inputs)
    assert 0.9 * kept <= after - before <= kept + sum(result.nbytes for result in own)


@pytest.mark.parametrize("name", NAMES)
def test_forward_that_drops_its_results_gives_its_own_alone(name: str) -> None:
    one = traced(name)
    inputs = _made_inputs(one.joint)
    found = []
    for module in (copy_of(one.joint.module), dropping(one.joint)):
        torch.manual_seed(0)
        found.append(module(*inputs))
    whole, own = found
    assert 0 < len(own) < len(whole)
    assert all(any(same(one, other) for other in whole) for one in own)


def same(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and torch.equal(one, other)


def test_what_backward_reads_is_cheaper_by_its_bytes() -> None:
    graph = at_100_us(traced("plain").graph)
    sizes = kept_bytes(graph)
    saved_us = 25.0
    found = less_for_kept(graph, costs_of(graph), saved_us)
    less = {op.name: op.cost_us - found[op.name] for op in graph.ops}
    assert sum(less.values()) == pytest.approx(saved_us)
    whole = sum(sizes.values())
    for name, us in less.items():
        assert us == pytest.approx(saved_us * sizes.get(name, 0) / whole)


def test_no_op_is_cheaper_than_a_part_of_its_cost() -> None:
    graph = at_100_us(traced("plain").graph)
    found = less_for_kept(graph, costs_of(graph), 1e9)
    assert set(found.values()) == {0.0, 100.0, 100.0 * LEAST_KEPT_PART}


@pytest.mark.parametrize("step_us", [1.0, 1e6])
def test_the_time_of_the_step_is_what_it_was(step_us: float) -> None:
    graph = at_100_us(traced("plain").graph)
    found = calibrated(graph, WholeStepTimes(step_us, 300.0))
    assert found.time_us == pytest.approx(max(step_us, graph.time_us))
    assert found.hash == graph.hash
