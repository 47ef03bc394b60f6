"""Templates: what each rule recomputes on a real GPT, and what all of them promise."""

from __future__ import annotations

import random

import msgspec
import pytest

from remat.baselines.torch_budget import store_all_saved_bytes
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.simulate import simulate
from remat.solver import make_solver, solve_within
from remat.solver.policies.template import NO_BLOCK, module_blocks, read_in_backward, unavoidable
from remat.solver.problem import Problem
from remat.solver.recompute_summary import is_fused_attention, op_kind
from tests.graphs import peak_bytes_of
from tests.solver.graphs.random_graphs import chain, random_graph
from tests.solver.graphs.traced_gpt import (
    ATTENTION,
    LAYERS,
    by_template,
    graph_of_modules,
    recomputed,
    saved_bytes,
    traced_gpt,
)

TEMPLATES = (
    "full",
    "every_n_layers",
    "selective",
    "keep_attention_output",
    "norms_and_activations",
    "torch_knapsack",
)
PRODUCTS = ("mm", "addmm", "bmm", "convolution")


@pytest.fixture(params=ATTENTION)
def gpt(request: pytest.FixtureRequest) -> TrainingGraph:
    return traced_gpt(request.param)


def test_full_recomputes_each_block_at_most_once(gpt: TrainingGraph) -> None:
    schedule = by_template(gpt, "full")
    again = recomputed(gpt, schedule)
    assert {op.module.split(".")[1] for op in again} == {str(i) for i in range(LAYERS)}
    assert all(op.module.startswith("blocks.") and not op.no_recompute for op in again)
    assert simulate(gpt, schedule).peak_bytes < peak_bytes_of(gpt)
    kinds = [op_kind(op.target) for op in again]
    assert kinds.count("gelu") == LAYERS
    assert kinds.count("native_layer_norm") == 2 * LAYERS


def test_full_saves_what_enters_a_block(gpt: TrainingGraph) -> None:
    """The residual stream before each block, and what the ops outside blocks save."""
    problem = Problem.of(gpt)
    block, fixed = module_blocks(gpt).of_op, unavoidable(problem)
    reads = [(v, op) for op in range(problem.n_forward) for v in problem.inputs[op]]
    crossing = {(v, op) for v, op in reads if block[problem.producer[v]] != block[op]}
    entering = {v for v, op in crossing if block[op] != NO_BLOCK}
    assert sum(not fixed[v] for v in entering) == LAYERS
    leaving = {v for v, _ in crossing}
    outside = {v for v in read_in_backward(problem) if block[problem.producer[v]] == NO_BLOCK}
    expected = entering | outside | leaving.intersection(read_in_backward(problem))
    total_bytes = sum(problem.size_bytes[v] for v in expected if not fixed[v])
    assert saved_bytes(gpt, by_template(gpt, "full")) == total_bytes


def test_every_layer_is_full(gpt: TrainingGraph) -> None:
    full = by_template(gpt, "full")
    for method in ("nth", "uniform"):
        assert by_template(gpt, "every_n_layers", n=1, method=method).steps == full.steps


def test_every_second_layer(gpt: TrainingGraph) -> None:
    again = recomputed(gpt, by_template(gpt, "every_n_layers", n=2))
    assert {op.module.split(".")[1] for op in again} == {"0", "2"}
    everywhere = recomputed(gpt, by_template(gpt, "every_n_layers", n=2, method="uniform"))
    assert {op.module.split(".")[1] for op in everywhere} == {"0", "1", "2"}


def test_every_n_layers_takes_the_fastest_that_fits(gpt: TrainingGraph) -> None:
    single = [solve_within(gpt, 1 << 40, "every_n_layers", n=n) for n in (1, 2, 3)]
    assert all(result.overhead == 0 for result in single)
    made = [simulate(gpt, by_template(gpt, "every_n_layers", n=n)) for n in (1, 2, 3)]
    for budget_bytes in {found.peak_bytes for found in made}:
        fitting = [found.time_us for found in made if found.peak_bytes <= budget_bytes]
        assert solve_within(gpt, budget_bytes, "every_n_layers").time_us == min(fitting)


def test_selective_recomputes_attention_cores_only() -> None:
    allowed = {
        "fused": {"_scaled_dot_product_flash_attention_for_cpu"},
        "written out": {
            "bmm", "_safe_softmax", "add", "dropout", "where", "tril", "ones",
            "scalar_tensor",
        },
    }  # fmt: skip
    for name in ATTENTION:
        graph = traced_gpt(name)
        again = recomputed(graph, by_template(graph, "selective"))
        kinds = [op_kind(op.target) for op in again]
        assert set(kinds) <= allowed[name]
        assert all(op.module.endswith(".attn") for op in again)
        attention = sum("softmax" in kind or "attention" in kind for kind in kinds)
        assert attention == LAYERS


def test_keep_attention_output_never_repeats_attention(gpt: TrainingGraph) -> None:
    schedule = by_template(gpt, "keep_attention_output")
    again = recomputed(gpt, schedule)
    kinds = {op_kind(op.target) for op in again}
    assert not any(is_fused_attention(kind) or "softmax" in kind for kind in kinds)
    assert not kinds & {"bmm"}
    assert {"addmm", "gelu", "native_layer_norm"} <= kinds
    full = simulate(gpt, by_template(gpt, "full"))
    found = simulate(gpt, schedule)
    assert gpt.time_us < found.time_us < full.time_us
    assert found.peak_bytes < peak_bytes_of(gpt)


def test_norms_and_activations_repeat_no_product(gpt: TrainingGraph) -> None:
    schedule = by_template(gpt, "norms_and_activations")
    kinds = [op_kind(op.target) for op in recomputed(gpt, schedule)]
    assert not {*PRODUCTS, "embedding"} & set(kinds)
    assert not any("attention" in kind or "softmax" in kind for kind in kinds)
    assert kinds.count("gelu") == LAYERS
    assert kinds.count("native_layer_norm") >= 2 * LAYERS
    assert simulate(gpt, schedule).peak_bytes < peak_bytes_of(gpt)
    assert saved_bytes(gpt, schedule) < store_all_saved_bytes(Problem.of(gpt))


def test_norm_that_is_written_out_is_recomputed() -> None:
    """A root-mean-square norm, its epsilon, a gate; not the residual sum, not the products."""
    kinds = ("mm", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "mm", "silu", "mul", "mm")
    targets = tuple(f"aten.{kind}.default" for kind in kinds)
    graph = graph_of_modules(*[""] * len(kinds), targets=targets)
    peak_bytes = peak_bytes_of(graph)
    lost = solve_within(graph, 1, "norms_and_activations")
    assert lost.least_feasible_bytes < peak_bytes
    schedule = by_template(graph, "norms_and_activations")
    again = [op_kind(op.target) for op in recomputed(graph, schedule)]
    assert set(again) <= {"pow", "mean", "add", "rsqrt", "mul", "_to_copy", "silu"}
    assert {"pow", "rsqrt", "silu"} <= set(again)


def test_activation_is_kept_where_its_input_is_not() -> None:
    """An input that nothing else keeps would only take the place of the result."""
    ops = (
        Op("a", "aten.mm.default", "forward", (), ("a",), 1.0),
        Op("b", "aten.relu.default", "forward", ("a",), ("b",), 1.0),
        Op("c", "t", "forward", ("b",), ("c",), 1.0),
        Op("d", "t", "backward", ("b", "c"), ("d",), 1.0),
    )
    values = tuple(Value(op.name, 8, op.name) for op in ops)
    graph = TrainingGraph(name="relu", ops=ops, values=values)
    assert "does not apply" in solve_within(graph, 1, "norms_and_activations").message


@pytest.mark.parametrize("solver", TEMPLATES)
def test_templates_keep_all_where_it_fits(solver: str, gpt: TrainingGraph) -> None:
    result = solve_within(gpt, peak_bytes_of(gpt), solver)
    assert result.status == "optimal"
    assert result.overhead == 0


@pytest.mark.parametrize("solver", TEMPLATES)
def test_the_least_peak_of_a_template_is_named_and_fits(solver: str, gpt: TrainingGraph) -> None:
    lost = solve_within(gpt, 1, solver)
    assert lost.status == "none found"
    assert 0 < lost.least_feasible_bytes < peak_bytes_of(gpt)
    assert lost.held_at_peak
    assert (
        solve_within(gpt, lost.least_feasible_bytes, solver).peak_bytes == lost.least_feasible_bytes
    )


@pytest.mark.parametrize(
    ("solver", "text"),
    [
        ("full", "no repeated block: the template does not apply"),
        ("every_n_layers", "no repeated block: the template does not apply"),
        ("keep_attention_output", "no repeated block: the template does not apply"),
        ("selective", "no attention found: the template does not apply"),
        ("norms_and_activations", "no norm or activation that could be recomputed"),
    ],
)
def test_a_template_that_does_not_apply_says_so(solver: str, text: str) -> None:
    graph = chain(6)
    result = solve_within(graph, peak_bytes_of(graph) - 1, solver)
    assert result.status == "none found"
    assert text in result.message
    assert result.least_feasible_bytes == peak_bytes_of(graph)


@pytest.mark.parametrize(
    ("solver", "options", "text"),
    [
        ("every_n_layers", {"n": -1}, "n must be 0 .* or more, not -1"),
        ("every_n_layers", {"method": "odd"}, "method must be one of nth, uniform, not 'odd'"),
        ("torch_knapsack", {"method": "lp"}, "method must be one of dp, greedy, ilp, not 'lp'"),
        ("torch_knapsack", {"steps": 1}, "steps must be 2 .* or more, not 1"),
    ],
)
def test_bad_options_say_what_is_allowed(
    solver: str, options: dict[str, object], text: str
) -> None:
    with pytest.raises(SolverError, match=text):
        make_solver(solver, **options)


@pytest.mark.parametrize("solver", TEMPLATES)
def test_templates_are_valid_on_labelled_random_graphs(solver: str) -> None:
    """Any labels on any graph give a schedule that the simulator takes."""
    kinds = ("mm", "bmm", "_softmax", "gelu", "native_layer_norm", "add", "native_dropout")
    source = random.Random(11)
    for _ in range(80):
        graph = labelled(random_graph(source, 14, 9), source, kinds)
        lost = solve_within(graph, 1, solver)
        least_bytes = lost.least_feasible_bytes or lost.peak_bytes
        assert solve_within(graph, least_bytes, solver).peak_bytes == least_bytes


def labelled(graph: TrainingGraph, source: random.Random, kinds: tuple[str, ...]) -> TrainingGraph:
    ops = tuple(
        msgspec.structs.replace(
            op,
            target=f"aten.{source.choice(kinds)}.default",
            module=source.choice(["", f"blocks.{i // 3}", f"blocks.{i // 3}.attn"]),
        )
        for i, op in enumerate(graph.ops)
    )
    return msgspec.structs.replace(graph, ops=ops)


def test_an_interrupt_keeps_what_was_found() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    graph = traced_gpt("fused")
    result = solve_within(graph, peak_bytes_of(graph) - 1, "every_n_layers", progress=interrupt)
    assert result.schedule is not None
    assert result.status == "time limit"
    assert "interrupted" in result.message


def test_same_result_twice(gpt: TrainingGraph) -> None:
    for solver in TEMPLATES:
        assert by_template(gpt, solver).steps == by_template(gpt, solver).steps
