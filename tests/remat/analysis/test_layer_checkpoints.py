"""Checkpointing every n-th layer, told where it comes within 1 % of a plan."""

from __future__ import annotations

import msgspec
import pytest

from remat.analysis.plan_figures import _ordinal, candidates, every_n_layers
from remat.budgets import unmodified
from remat.graph_capture.eager_step import with_eager_sizes
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.policies.template import module_blocks, nth_blocks, template_sequence
from remat.solver.problem import Problem
from remat.solver.state import schedule_of
from tests.solver.graphs.traced_gpt import LAYERS, traced_gpt


@pytest.fixture(scope="module")
def gpt() -> TrainingGraph:
    """At costs that are no measurement: by what ops write, products eight times as much."""
    graph = with_eager_sizes(traced_gpt("fused"))
    ops = tuple(msgspec.structs.replace(op, cost_us=cost_us(graph, op)) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops)


def cost_us(graph: TrainingGraph, op: Op) -> float:
    written = sum(graph.value_by_name[name].size_bytes for name in op.outputs)
    is_product = "mm" in op.target or "attention" in op.target
    return 1.0 + written / 1000 * (8 if is_product else 1)


def nth(graph: TrainingGraph, n: int) -> tuple[int, float]:
    """Peak and time of checkpointing every n-th layer."""
    problem = Problem.of(graph)
    template = nth_blocks(problem, module_blocks(graph), n)
    found = simulate(graph, schedule_of(problem, template_sequence(problem, template)))
    return found.peak_bytes, found.time_us


def test_a_plan_that_is_every_second_layer_is_told_as_such(gpt: TrainingGraph) -> None:
    peak_bytes, time_us = nth(gpt, 2)
    result = solve_within(gpt, peak_bytes, "every_n_layers", n=2)
    found = every_n_layers(gpt, result)
    assert found is not None
    assert (found.n, found.layers) == (2, ("blocks.0", "blocks.2"))
    assert (found.peak_bytes, found.time_us, found.slower) == (peak_bytes, time_us, 0.0)
    assert "checkpointing every 2nd layer of blocks.* comes within 1 % of this plan" in str(found)


def test_at_a_tighter_budget_it_is_every_layer(gpt: TrainingGraph) -> None:
    peak_bytes, _ = nth(gpt, 1)
    found = every_n_layers(gpt, solve_within(gpt, peak_bytes, "every_n_layers"))
    assert found is not None
    assert found.n == 1
    assert len(found.layers) == LAYERS
    assert str(found).startswith("checkpointing every layer of blocks.* comes")


def test_nothing_is_told_of_a_plan_that_is_faster_keeps_all_or_is_none(gpt: TrainingGraph) -> None:
    peak_bytes, time_us = nth(gpt, 2)
    faster = solve_within(gpt, peak_bytes, "cut")
    assert 1.01 * faster.time_us < time_us
    assert every_n_layers(gpt, faster) is None
    assert every_n_layers(gpt, solve_within(gpt, 1 << 40, "cut")) is None
    assert every_n_layers(gpt, solve_within(gpt, 1, "cut")) is None


def sharing_layers(checkpoint: int = 0) -> TrainingGraph:
    """The layer 0 reads what the layer 1 trains, as where it is detached, and runs again later."""
    ops = (
        Op("a", "aten.a", "forward", ("x", "p"), ("a",), 1.0, module="layers.0",
           checkpoint=checkpoint),
        Op("b", "aten.b", "forward", ("a",), ("b",), 1.0, module="layers.0", checkpoint=checkpoint),
        Op("c", "aten.c", "forward", ("b", "p"), ("c",), 1.0, module="layers.1"),
        Op("d", "aten.d", "forward", ("c",), ("d",), 1.0, module="layers.1"),
        Op("gc", "aten.gc", "backward", ("c", "d"), ("gc",), 1.0),
        Op("update", "remat.update", "backward", ("gc", "p"), (), 1.0, no_recompute="it updates"),
        Op("ga", "aten.ga", "backward", ("a",), ("ga",), 1.0),
    )  # fmt: skip
    made = [Value(name, 100, op.name) for op in ops for name in op.outputs]
    return TrainingGraph("Shared", ops, (Value("x", 0), Value("p", 0, kind="parameter"), *made))


def test_a_layer_runs_again_before_what_it_reads_is_updated() -> None:
    graph = sharing_layers()
    first, *_ = candidates(graph, graph.time_us)
    assert first.n == 1
    assert first.time_us > graph.time_us


def test_so_does_a_checkpoint_of_the_unmodified_step() -> None:
    graph = sharing_layers(checkpoint=1)
    assert unmodified(graph).time_us > graph.time_us


def test_ordinals() -> None:
    assert [_ordinal(n) for n in (2, 3, 4, 11, 12, 21, 113)] == [
        "2nd", "3rd", "4th", "11th", "12th", "21st", "113th",
    ]  # fmt: skip
