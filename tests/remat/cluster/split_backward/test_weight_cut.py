"""The cut of backward graphs that are made by hand or at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from remat.cluster.apply.weight_cut import is_heavy, is_mark, split_graph
from remat.cluster.parts import is_product
from remat.rewriter.graphs.backward_parts import SplitGraphs
from remat.rewriter.graphs.codegen import compile_boxed, compile_in_steps
from tests.remat.cluster.split_backward.made_backward import Backward, N, at_random

aten = torch.ops.aten


def whole(backward: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor | None]:
    results = compile_boxed(backward)([one.clone() for one in inputs])
    return [None if one is None else one.clone() for one in results]


def in_two(graphs: SplitGraphs, inputs: list[Tensor]) -> list[Tensor | None]:
    """What both parts return together."""
    given = compile_boxed(graphs.inputs)([one.clone() for one in inputs])
    carried, results = list(given[graphs.n_results :]), list(given[: graphs.n_results])
    found = [None if one is None else one.clone() for one in results]
    if graphs.places:
        for places, gradients in compile_in_steps(graphs.weights)(carried):
            for place, gradient in zip(places, gradients, strict=True):
                found[place] = gradient.clone()
    return found


@pytest.mark.parametrize("seed", range(300))
def test_both_parts_make_what_the_whole_makes(seed: int) -> None:
    backward, weights = at_random(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(N, N) for _ in range(4)]
    expected = whole(backward, inputs)
    found = in_two(split_graph(backward, weights), inputs)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def names(gm: fx.GraphModule) -> set[str]:
    return {n.name for n in gm.graph.nodes if n.op == "call_function" and not is_mark(n)}


@pytest.mark.parametrize("seed", range(40))
def test_products_of_weights_alone_run_in_the_second_part_and_no_op_twice(seed: int) -> None:
    backward, weights = at_random(seed)
    graphs = split_graph(backward, weights)
    assert not {n for n in names(graphs.inputs) & names(graphs.weights) if "clone" not in n}
    results: Any = backward.graph.output_node().args[0]
    given = [None if i in weights else r for i, r in enumerate(results)]
    backward.graph.output_node().args = (tuple(given),)
    of_inputs = split_graph(backward, [])
    products = [n.name for n in graphs.inputs.graph.nodes if is_heavy(n)]
    assert products == [n.name for n in of_inputs.inputs.graph.nodes if is_heavy(n)]


def chain() -> tuple[Backward, fx.Node, fx.Node]:
    """The gradient of an input through one product, and the saved input of a linear layer."""
    backward = Backward(3, size=64)
    x, weight, tangent = backward.inputs
    return backward, x, backward.call(aten.mm.default, tangent, weight)


def test_what_is_cast_for_a_product_is_held_in_half_precision() -> None:
    backward, x, gradient = chain()
    half = backward.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    other = backward.call(aten._to_copy.default, backward.inputs[2], dtype=torch.bfloat16)
    product = backward.call(aten.mm.default, half, other)
    graphs = split_graph(backward.ending([product, gradient]), [0], ["saved_1"])
    assert graphs.live.held == 2 * 64 * 64 * 2
    assert {half.name, other.name} <= names(graphs.inputs)
    assert not graphs.reads_tangents
    assert [n.name for n in graphs.weights.graph.nodes if is_heavy(n)] == [product.name]


def test_a_small_sum_is_made_early_and_only_where_that_frees_what_it_sums() -> None:
    backward, x, gradient = chain()
    bias = backward.call(aten.sum.dim_IntList, backward.inputs[2], [0])
    graphs = split_graph(backward.ending([bias, gradient]), [0], ["saved_1"])
    assert graphs.live.held == 64 * 4
    backward, x, gradient = chain()
    bias = backward.call(aten.sum.dim_IntList, backward.inputs[2], [0])
    weight = backward.call(aten.mm.default, x, backward.inputs[2])
    graphs = split_graph(backward.ending([bias, weight, gradient]), [0, 1], ["saved_1"])
    assert graphs.live.held == 2 * 64 * 64 * 4
    assert bias.name in names(graphs.weights)
    assert graphs.reads_tangents


def test_parameters_cost_nothing_to_hold() -> None:
    backward, x, gradient = chain()
    weight = backward.call(aten.mm.default, x, backward.inputs[1])
    results = backward.ending([weight, gradient])
    assert split_graph(results, [0], ["saved_1"]).live.held == 64 * 64 * 4
    assert split_graph(results, [0]).live.held == 2 * 64 * 64 * 4


def test_a_planner_without_torch_knows_the_same_products() -> None:
    for packet in flop_registry:
        if not str(packet).startswith("aten."):
            continue
        assert is_product(f"{packet}.default"), packet
    for packet in (aten.mul, aten.sum, aten._to_copy, aten.native_layer_norm_backward):
        assert packet not in flop_registry
        assert not is_product(f"{packet}.default")
