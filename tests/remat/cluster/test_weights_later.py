"""What runs apart from the gradient of a block's input: by hand, and on a block of GPT 175B."""

from __future__ import annotations

from pathlib import Path

from remat.cluster.parts import WeightsLater, is_product, part_of, weights_later
from remat.graph_capture.graph import Op, TrainingGraph, Value

STORED = Path(__file__).with_name("gpt_175b_block_tp8.json")
MM = "aten.mm.default"


def linear() -> TrainingGraph:
    """y = relu(x w), with a bias: backward masks, multiplies twice, sums, and casts one result."""
    ops = (
        Op("x", "remat.border", "forward", (), ("x",)),
        Op("mm", MM, "forward", ("x", "w"), ("h",), 10.0),
        Op("relu", "aten.relu.default", "forward", ("h",), ("y",), 1.0),
        Op("tangents", "remat.tangents", "backward", (), ("dy",)),
        Op("mask", "aten.threshold_backward.default", "backward", ("dy", "y"), ("dh",), 1.0),
        Op("mm_w", MM, "backward", ("dh", "x"), ("dw",), 10.0),
        Op("cast", "aten._to_copy.default", "backward", ("dw",), ("dw32",), 2.0),
        Op("sum", "aten.sum.dim_IntList", "backward", ("dh",), ("db",), 1.0),
        Op("mm_x", MM, "backward", ("dh", "w"), ("dx",), 10.0),
    )
    sizes = {"x": 64, "h": 32, "y": 32, "dy": 32, "dh": 32, "dw": 16, "dw32": 32, "db": 4, "dx": 64}
    made = {name: op.name for op in ops for name in op.outputs}
    values = (
        Value("w", 16, kind="parameter"),
        *(Value(name, size, made[name]) for name, size in sizes.items()),
    )
    return TrainingGraph("linear", ops, values, ("y",), ("dw32", "db", "dx"))


def test_products_of_weights_and_what_reads_them_run_later() -> None:
    """Held are the input and the gradient that they read; the sum of the bias runs early."""
    assert weights_later(linear(), "dx") == WeightsLater(12.0, 64 + 32)


def test_a_part_whose_backward_is_whole_has_nothing_for_later() -> None:
    assert part_of(linear()).later == WeightsLater()
    assert part_of(linear(), "dx").later.weight_us == 12.0


def test_of_a_gpt_block_a_third_of_the_products_is_of_weights() -> None:
    graph = TrainingGraph.from_json(STORED.read_bytes())
    found = weights_later(graph, graph.outputs[-1])
    products = [op for op in graph.ops if op.target in (MM, "aten.addmm.default")]
    forward_us = sum(op.cost_us for op in products if op.phase == "forward")
    assert 0.95 * forward_us < found.weight_us < 1.1 * forward_us
    of_linear = [op for op in products if op.phase == "backward"]
    assert len(of_linear) == 2 * sum(op.phase == "forward" for op in products)
    assert found.held_bytes < part_of(graph).options[0].saved_bytes


def test_what_counts_as_a_product() -> None:
    assert is_product("aten.convolution_backward.default")
    assert is_product("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
    assert not is_product("aten.sum.dim_IntList")
    assert not is_product("_c10d_functional.all_gather_into_tensor.default")
