"""Predicted bytes of both parts of a split backward are those that their code has live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.cluster.apply.weight_cut import split_graph
from remat.graph_capture.devices.memory_events import measure_regions
from remat.rewriter.graphs.codegen import compile_boxed, compile_in_steps
from tests.remat.cluster.split_backward.made_backward import Backward, N, at_random, aten
from tests.rows import each_nth


def measured(run: Callable[[list[Any]], Any], make: Callable[[], list[Any]]) -> int:
    """The most bytes live while it runs, with those of what it is given."""
    given_bytes = 0

    def regions() -> Iterator[Callable[[], Any]]:
        # Made under the profiler, which does not see frees of what was there before.
        nonlocal given_bytes
        given = make()
        given_bytes = storage_bytes(given)
        yield lambda: run(given)

    (region,) = measure_regions(regions())
    return given_bytes + region.peak_bytes


def storage_bytes(given: list[Any]) -> int:
    storages = [one.untyped_storage() for one in given if isinstance(one, Tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


@pytest.mark.parametrize("seed", each_nth(4, range(80)))
def test_both_parts_have_live_what_is_predicted(seed: int) -> None:
    backward, weights = at_random(seed)
    graphs = split_graph(backward, weights)
    run_inputs = compile_boxed(graphs.inputs)
    steps = compile_in_steps(graphs.weights) if graphs.places else None

    def given() -> list[Any]:
        return [torch.randn(N, N) for _ in range(4)]

    def carried() -> list[Any]:
        return list(run_inputs(given())[graphs.n_results :])

    def run_weights(taken: list[Any]) -> None:
        assert steps is not None
        for _, gradients in steps(taken):
            gradients.clear()

    assert measured(run_inputs, given) == graphs.live.inputs
    assert storage_bytes(carried()) == graphs.live.held
    if graphs.places:
        assert measured(run_weights, carried) == graphs.live.weights


def test_parameters_cost_nothing() -> None:
    backward = Backward(2, size=64)
    saved, tangent = backward.inputs
    product = backward.call(aten.mm.default, saved, tangent)
    gradient = backward.call(aten.mm.default, tangent, saved)
    graph = backward.ending([product, gradient])
    one = 64 * 64 * 4
    assert split_graph(graph, [0], ["saved_0"]).live.inputs == 2 * one
    assert split_graph(graph, [0]).live.inputs == 3 * one
