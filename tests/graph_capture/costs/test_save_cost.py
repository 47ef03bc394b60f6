"""What keeping results for backward takes: measured on forward alone, taken off what keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat.graph_capture.costs.cache import WholeStepTimes
from remat.graph_capture.costs.step_time import (
    LEAST_KEPT_PART,
    calibrated,
    costs_of,
    forwards,
    less_for_kept,
)
from remat.graph_capture.graph import TrainingGraph
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


@pytest.mark.parametrize("name", NAMES)
def test_both_forwards_run_and_differ_by_what_backward_reads(name: str) -> None:
    one = traced(name)
    placeholders = one.joint.module.graph.find_nodes(op="placeholder")
    sizes: list[int] = []
    for forward in forwards(one.joint):
        inputs = [_zeros(node.meta.get("val")) for node in placeholders]
        results = forward(*inputs)
        storages = {r.untyped_storage()._cdata: r.untyped_storage().nbytes() for r in results}
        given = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
        sizes.append(sum(size for key, size in storages.items() if key not in given))
    kept, dropped = sizes
    assert kept > dropped
    assert kept >= 0.9 * sum(kept_bytes(one.graph).values())


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
